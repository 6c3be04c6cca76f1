"""The portable kernel on an NVIDIA GPU: values on a grid, graphs, alignment, limits."""

import itertools

import pytest
import torch
from triton_steps import make_step, relative_error

from mla_decode import DecodeProblem, Mask, detect_device
from mla_decode_triton import chosen_backend

backend = chosen_backend("portable")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TOLERANCE = 4e-3
HEADS = (1, 5, 16, 128)
QUERY_LENS = (1, 3, 8, 32)
PAGES = (1, 16, 32, 64, 128)


def problem_of(**fields):
    fields.setdefault("num_q_heads", 16)
    fields.setdefault("needs_lse", True)
    fields.setdefault("masks", frozenset(Mask))
    fields.setdefault("max_num_reqs", 8)
    fields.setdefault("max_model_len", 8192)
    if fields.get("q_dtype") == "fp16":
        fields |= {"kv_dtype": "fp16", "out_dtype": "fp16"}
    return DecodeProblem(**fields)


def ragged(query_len, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(query_len, 1500, (5,), generator=generator).tolist()
    return [query_len, *lengths, 1024, 0]


def check(step, builder):
    builder.partial_out.fill_(torch.nan)
    builder.partial_lse.fill_(torch.nan)
    out, lse = step.run(builder, by=backend)
    truth, true_lse = step.oracle()
    query_len = builder._decode_query_len
    for request, seq_len in enumerate(step.common.seq_lens.tolist()):
        rows = slice(request * query_len, (request + 1) * query_len)
        if seq_len:
            assert relative_error(out[rows], truth[rows]) < TOLERANCE
        else:
            assert not out[rows].any()
    lse = lse.cpu()
    assert torch.equal(lse.isinf(), true_lse.isinf())
    live = ~true_lse.isinf()
    torch.testing.assert_close(lse[live].double(), true_lse[live], atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("page_size", PAGES)
def test_agrees_with_float64_over_ragged_batches(page_size, kind):
    device = detect_device()
    for index, (heads, query_len) in enumerate(itertools.product(HEADS, QUERY_LENS)):
        fields = {"q_dtype": "fp16"} if kind == "fp16" else {"kv_dtype": kind}
        problem = problem_of(
            num_q_heads=heads,
            query_lens=frozenset({query_len}),
            page_size=page_size,
            **fields,
        )
        builder = backend.builder_cls(problem, device)
        for causal in (False, True):
            lengths = ragged(query_len, seed=2 * index + causal)
            check(
                make_step(
                    problem,
                    device,
                    lengths,
                    query_len=query_len,
                    causal=causal,
                    seed=index,
                ),
                builder,
            )


@pytest.mark.parametrize("num_reqs", [1, 3, 8])
def test_replays_a_graph_over_growing_lengths(num_reqs):
    device = detect_device()
    problem = problem_of(query_lens=frozenset({4}), graphs=True)
    builder = backend.builder_cls(problem, device)

    def step_of(seq_len):
        return make_step(
            problem, device, [seq_len] * num_reqs, query_len=4, causal=True
        )

    first = step_of(60)
    q = first.q.clone()
    pool = make_step(problem, device, [8192] * num_reqs, query_len=4, causal=True)
    out = torch.empty(num_reqs * 4, 16, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(num_reqs * 4, 16, device="cuda")

    def run(metadata):
        backend.forward(
            q,
            pool.kv_cache,
            metadata,
            softmax_scale=192**-0.5,
            out=out,
            lse=lse,
        )

    def common_of(seq_len):
        common = pool.common
        fields = {name: getattr(common, name) for name in type(common).__slots__}
        lens = torch.full((num_reqs,), seq_len, dtype=torch.int32, device="cuda")
        return type(common)(**fields | {"seq_lens": lens, "max_seq_len": seq_len})

    metadata = builder.build_for_capture(common_of(60))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(metadata)
    for replay in range(60):
        seq_len = 4 + replay * 137
        builder.build(common_of(seq_len))
        out.fill_(torch.nan)
        graph.replay()
        replayed, replayed_lse = out.clone(), lse.clone()
        run(builder.build(common_of(seq_len)))
        assert torch.equal(out, replayed)
        assert torch.equal(lse, replayed_lse)
        if replay % 20 == 0:
            truth = make_truth(q, pool, seq_len)
            assert relative_error(out, truth) < TOLERANCE


def make_truth(q, pool, seq_len):
    from mla_decode.reference.oracle import decode_oracle

    common = pool.common
    lens = torch.full_like(common.seq_lens, seq_len)
    return decode_oracle(
        q,
        pool.kv_cache,
        common.block_table_tensor,
        lens,
        common.query_start_loc,
        causal=True,
        softmax_scale=192**-0.5,
    )[0]


def test_unaligned_tensors_take_the_slower_way_to_the_same_values():
    device = detect_device()
    problem = problem_of(kv_page_stride=64 * 576 + 4)
    step = make_step(
        problem, device, [100, 700], query_len=1, causal=True, stride=64 * 576 + 4
    )
    builder = backend.builder_cls(problem, device)
    check(step, builder)


def test_reads_pages_past_two_to_the_31_elements():
    device = detect_device()
    free, _ = torch.cuda.mem_get_info()
    pages = 2**31 // (64 * 576) + 64
    if free < pages * 64 * 576 * 2 * 1.2:
        pytest.skip("needs 6 GB of GPU memory (issue 4)")
    problem = problem_of()
    small = make_step(problem, device, [300], query_len=1, causal=True)
    cache = torch.full((pages, 64, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    offset = pages - small.kv_cache.shape[0]
    cache[offset:] = small.kv_cache
    table = small.common.block_table_tensor.clone()
    table[:, :5] += offset
    fields = {n: getattr(small.common, n) for n in type(small.common).__slots__}
    far = type(small.common)(**fields | {"block_table_tensor": table})
    builder = backend.builder_cls(problem, device)
    near = small.run(builder, by=backend).out
    out = backend.forward(
        small.q, cache, builder.build(far), softmax_scale=192**-0.5
    ).out
    assert torch.equal(out, near)


def test_every_fp8_number_is_widened_exactly():
    device = detect_device()
    problem = problem_of(num_q_heads=1, kv_dtype="fp8", out_dtype="fp32", page_size=1)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    rows = torch.zeros(len(codes), 576, dtype=torch.uint8)
    rows[:, 0:512:2] = codes[:, None]
    rows[:, 1:512:2] = codes.flip(0)[:, None]
    cache = rows.view(len(codes), 1, 576).cuda()
    builder = backend.builder_cls(problem, device)
    step = make_step(problem, device, [1] * 8, query_len=1, causal=True)
    one = torch.ones(1, device="cuda")
    fields = {n: getattr(step.common, n) for n in type(step.common).__slots__}
    for first in range(0, len(codes), 8):
        table = torch.arange(first, first + 8, dtype=torch.int32, device="cuda")
        table = table.clamp(max=len(codes) - 1)
        common = type(step.common)(**fields | {"block_table_tensor": table[:, None]})
        out = backend.forward(
            step.q.nan_to_num(),
            cache,
            builder.build(common),
            softmax_scale=1.0,
            kv_scale=one,
        ).out
        read = rows[table.long().cpu(), :512].view(torch.float8_e4m3fn).float()
        assert torch.equal(out[:, 0].cpu(), read)
