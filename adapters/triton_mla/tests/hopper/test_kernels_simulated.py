"""Both variants of the kernel, their own source executed by the simulator."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch


def _load(path):
    spec = importlib.util.spec_from_file_location(f"hopper_tests_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# The import mode puts no test folder on the path.
simulator = _load(Path(__file__).with_name("simulator.py"))
SCALE = 576**-0.5
KV_SCALE = 0.375


def make_batch(lens, query_len, num_heads, page, dtype, *, seed=0, gap=0):
    """A poisoned batch: everything that must not be read is NaN or out of range."""
    generator = torch.Generator().manual_seed(seed)
    pages_of = [math.ceil(n / page) for n in lens]
    num_pages = sum(pages_of) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    width = max([*pages_of, 1]) + 2
    table = torch.full((len(lens), width), -(2**30), dtype=torch.int32)
    storage = torch.full((num_pages, page * 576 + gap), float("nan"), dtype=dtype)
    cache = storage[:, : page * 576].view(num_pages, page, 576)
    for req, length in enumerate(lens):
        for j in range(pages_of[req]):
            number = order.pop()
            table[req, j] = number
            live = min(page, length - j * page)
            cache[number, :live] = torch.randn(live, 576, generator=generator).to(dtype)
    rows = query_len * num_heads
    q = torch.randn(len(lens), rows, 576, generator=generator).to(dtype)
    for req, length in enumerate(lens):
        if length == 0:
            q[req] = float("nan")
    return q, cache, table


def oracle(q, cache, table, lens, query_len, num_heads, *, causal):
    """float64, one request at a time."""
    out = torch.zeros(*q.shape[:2], 512, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    page = cache.shape[1]
    token = torch.arange(q.shape[1]) // num_heads
    for req, length in enumerate(lens):
        if length == 0:
            continue
        pages = table[req, : math.ceil(length / page)].long()
        keys = cache[pages].reshape(-1, 576)[:length].double()
        scores = q[req].double() @ keys.T * SCALE
        if causal:
            visible = length - query_len + token + 1
            hidden = torch.arange(length)[None] >= visible[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        lse[req] = scores.logsumexp(-1)
        weights = (scores - lse[req].nan_to_num(neginf=0)[:, None]).exp()
        out[req] = weights @ keys[:, :512]
    return out, lse


def simulate(
    variant,
    plan_kernel,
    merge_kernel,
    lens,
    *,
    query_len,
    num_heads,
    page,
    causal,
    num_parts,
    dtype=torch.bfloat16,
    seed=0,
    gap=0,
    broken=None,
):
    from mla_decode_triton.hopper import asym, swap, swap_fp8

    q, cache, table = make_batch(
        lens, query_len, num_heads, page, dtype, seed=seed, gap=gap
    )
    if variant == "swap_fp8":
        cache = cache.to(torch.float8_e4m3fn)
        truth = cache.double() * KV_SCALE
    else:
        truth = cache
    expected = oracle(q, truth, table, lens, query_len, num_heads, causal=causal)
    num_reqs, num_rows = q.shape[:2]
    steps = num_reqs.bit_length()
    block_reqs, block_parts = 1 << steps, 1 << num_parts.bit_length()
    schedule = torch.full((8 + 8 * block_parts,), 2**30, dtype=torch.int32)
    scratch = torch.empty(2 * block_reqs + 8 * block_parts, dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    plan_kernel[(1,)](
        seq_lens,
        schedule,
        scratch,
        num_reqs,
        num_parts,
        OVERHEAD=3,
        MERGE=3,
        SNAP=2,
        MIN_TILES=1,
        BLOCK_REQS=block_reqs,
        BLOCK_PARTS=block_parts,
        STEPS=steps,
    )
    nan = float("nan")
    out = torch.full((num_reqs * num_rows * 512,), nan, dtype=dtype)
    lse = torch.full((num_reqs * num_rows,), nan)
    partial_out = torch.full((2 * num_parts * num_rows * 512,), nan)
    partial_lse = torch.full((2 * num_parts * num_rows,), nan)
    tile_rows = 64 if "asym" in variant else (16 if num_rows <= 16 else 32)
    pointer, descriptor = simulator.Pointer, simulator.Descriptor
    arguments = dict(  # noqa: C408 - reads as a call
        q_latent=descriptor(q[..., :512], [1, tile_rows, 64]),
        q_rope=descriptor(q[..., 512:], [1, tile_rows, 64]),
        kv=descriptor(cache, [1, min(page, 64), 64]),
        table=pointer(table.flatten()),
        seq_lens=pointer(seq_lens),
        schedule=pointer(schedule),
        out=pointer(out),
        lse=pointer(lse),
        partial_out=pointer(partial_out),
        partial_lse=pointer(partial_lse),
        scale_log2=SCALE * math.log2(math.e),
        num_heads=num_heads,
        query_len=query_len,
        table_stride=table.stride(0),
        num_pages=cache.shape[0],
        num_reqs=num_reqs,
        num_parts=num_parts,
        CAUSAL=causal,
        NEEDS_LSE=True,
        PAGE=page,
    )
    module = {"swap": swap, "swap_fp8": swap_fp8}.get(variant, asym)
    if broken is not None:
        module = _load(broken)
    if module is asym or "asym" in variant:
        arguments["AHEAD"] = variant == "asym ahead"
    else:
        arguments["ROWS"] = tile_rows
    if variant == "swap_fp8":
        arguments["kv_scale"] = pointer(torch.tensor([KV_SCALE]))
    grid = (math.ceil(num_rows / tile_rows), num_parts)
    name = "asym" if "asym" in variant else variant
    simulator.run(module, f"{name}_kernel", grid, arguments, seed=seed)
    merge_kernel[(3,)](
        partial_out,
        partial_lse,
        out,
        lse,
        schedule,
        num_rows,
        NEEDS_LSE=True,
        BLOCK_PARTS=block_parts,
        BLOCK_PIECES=4,
        BLOCK_COLUMNS=128,
        EARLY=False,
    )
    return (out.view(num_reqs, num_rows, 512), lse.view(num_reqs, num_rows)), expected


def check(result, expected):
    (out, lse), (out_ref, lse_ref) = result, expected
    for req in range(out.shape[0]):
        error = (out[req].double() - out_ref[req]).norm()
        assert error <= 6e-3 * out_ref[req].norm()
        assert torch.equal(lse[req].isneginf(), lse_ref[req].isneginf())
        finite = ~lse_ref[req].isneginf()
        torch.testing.assert_close(
            lse[req][finite].double(), lse_ref[req][finite], atol=2e-4, rtol=0
        )


LENS = [300, 0, 4, 64, 129, 0]


@pytest.mark.parametrize(
    ("variant", "query_len", "num_heads", "page", "causal"),
    [
        ("swap", 1, 16, 64, False),
        ("swap", 3, 5, 16, True),
        ("swap", 2, 16, 128, False),
        ("asym", 4, 16, 64, True),
        ("asym", 3, 30, 32, False),
        ("asym", 4, 7, 128, True),
        ("asym ahead", 3, 30, 64, True),
        ("asym ahead", 3, 30, 16, False),
        ("swap_fp8", 2, 16, 64, True),
        ("swap_fp8", 3, 5, 16, False),
    ],
)
def test_agrees_with_float64(
    plan_kernel, merge_kernel, variant, query_len, num_heads, causal, page
):
    check(
        *simulate(
            variant,
            plan_kernel,
            merge_kernel,
            LENS,
            query_len=query_len,
            num_heads=num_heads,
            page=page,
            causal=causal,
            num_parts=5,
            seed=page,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(("page", "num_parts"), [(16, 1), (32, 9), (64, 3), (128, 9)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("variant", "query_len", "num_heads"),
    [
        ("swap", 3, 5),
        ("swap_fp8", 2, 16),
        ("asym", 4, 16),
        ("asym ahead", 3, 30),
    ],
)
def test_agrees_with_float64_on_the_whole_grid(
    plan_kernel, merge_kernel, variant, query_len, num_heads, causal, page, num_parts
):
    check(
        *simulate(
            variant,
            plan_kernel,
            merge_kernel,
            LENS,
            query_len=query_len,
            num_heads=num_heads,
            page=page,
            causal=causal,
            num_parts=num_parts,
            dtype=torch.float16,
            seed=num_parts,
        )
    )


def test_pages_may_lie_apart(plan_kernel, merge_kernel):
    check(
        *simulate(
            "swap",
            plan_kernel,
            merge_kernel,
            LENS,
            query_len=1,
            num_heads=16,
            page=32,
            causal=False,
            num_parts=4,
            gap=40,
        )
    )


@pytest.mark.parametrize(
    ("variant", "before", "after", "complaint"),
    [
        (
            "asym",
            "    fence_async_shared()\n    signal(weights_full)\n",
            "    signal(weights_full)\n",
            "unfenced",
        ),
        (
            "asym",
            "    mbarrier.wait(right_full.index(stage), parity)\n",
            "",
            "in flight",
        ),
        (
            "swap",
            "                mbarrier.wait(left_full.index(stage), parity)\n",
            "",
            "in flight",
        ),
        ("swap", "            signal(q_free)\n", "", "waiting for parity"),
        (
            "swap",
            "TILE * (HALF + 64) * BYTES",
            "TILE * HALF * BYTES",
            "in flight|waiting for parity|arrivals",
        ),
    ],
)
def test_the_simulator_finds_what_is_planted(
    plan_kernel, merge_kernel, variant, before, after, complaint, tmp_path, monkeypatch
):
    from mla_decode_triton.hopper import asym, swap

    source = Path({"asym": asym, "swap": swap}[variant].__file__).read_text()
    assert before in source
    path = tmp_path / f"broken_{variant}.py"
    path.write_text(source.replace(before, after))
    monkeypatch.setattr(simulator, "DEADLOCK_S", 3)
    with pytest.raises(RuntimeError, match=complaint):
        simulate(
            variant,
            plan_kernel,
            merge_kernel,
            LENS,
            query_len=1,
            num_heads=16,
            page=64,
            causal=False,
            num_parts=2,
            broken=path,
        )
