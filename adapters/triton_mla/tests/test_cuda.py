"""The portable kernel on an NVIDIA GPU: values on a grid, graphs, alignment, limits."""

import itertools
from dataclasses import replace

import pytest
import torch
from triton_steps import SCALE, make_step, relative_error

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


def check(step, builder, truth=None):
    builder.partial_out.fill_(torch.nan)
    builder.partial_lse.fill_(torch.nan)
    out, lse = step.run(builder, by=backend)
    right, right_lse = truth or step.truth()
    query_len = step.common.max_query_len
    for request, seq_len in enumerate(step.common.seq_lens.tolist()):
        rows = slice(request * query_len, (request + 1) * query_len)
        if seq_len:
            assert relative_error(out[rows], right[rows]) < TOLERANCE
        else:
            assert not out[rows].any()
    live = ~right_lse.isinf()
    assert torch.equal(lse.isinf(), ~live)
    torch.testing.assert_close(lse[live].double(), right_lse[live], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("kind", "page_size"),
    [
        # Kernels differ by these and by tile, mask and split, not by heads or block.
        *itertools.product(["bf16", "fp8"], PAGES),
        *itertools.product(["fp16"], [16, 64]),
    ],
)
def test_agrees_with_float64_over_ragged_batches(kind, page_size):
    device = detect_device()
    splits_met = set()
    for heads in HEADS:
        fields = {"q_dtype": "fp16"} if kind == "fp16" else {"kv_dtype": kind}
        problems = [
            problem_of(
                num_q_heads=heads,
                query_lens=frozenset(QUERY_LENS),
                page_size=page_size,
                max_splits=cap,
                **fields,
            )
            for cap in (None, 1)
        ]
        builders = [backend.builder_cls(problem, device) for problem in problems]
        for query_len in QUERY_LENS:
            seed = 40 * heads + query_len
            drawn = make_step(
                problems[0],
                device,
                ragged(query_len, seed),
                query_len=query_len,
                causal=False,
                seed=seed,
            )
            for causal in (False, True):
                step = drawn.under(causal=causal)
                truth = step.truth()
                for builder in builders:
                    check(step, builder, truth)
                    splits = builder.build(step.common).step.num_splits
                    splits_met.add(splits > 1)
    assert splits_met == {False, True}


def test_replays_a_graph_over_growing_lengths():
    device = detect_device()
    problem = problem_of(
        query_lens=frozenset({4}), masks=frozenset({Mask.CAUSAL}), graphs=True
    )
    builder = backend.builder_cls(problem, device)
    for num_reqs in (1, 3, 8):
        replay_growing(problem, device, builder, num_reqs)


def replay_growing(problem, device, builder, num_reqs):
    pool = make_step(problem, device, [8192] * num_reqs, query_len=4, causal=True)
    out = torch.empty(num_reqs * 4, 16, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(num_reqs * 4, 16, device="cuda")

    def step_of(seq_len):
        common = pool.common
        fields = {name: getattr(common, name) for name in type(common).__slots__}
        lens = torch.full((num_reqs,), seq_len, dtype=torch.int32, device="cuda")
        grown = type(common)(**fields | {"seq_lens": lens, "max_seq_len": seq_len})
        return replace(pool, common=grown)

    def run(metadata):
        backend.forward(
            pool.q, pool.kv_cache, metadata, softmax_scale=SCALE, out=out, lse=lse
        )

    metadata = builder.build_for_capture(step_of(60).common)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(metadata)
    for replay in range(60):
        step = step_of(4 + replay * 137)
        builder.build(step.common)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        replayed, replayed_lse = out.clone(), lse.clone()
        run(builder.build(step.common))
        assert torch.equal(out, replayed)
        assert torch.equal(lse, replayed_lse)
        if replay % 20 == 0:
            assert relative_error(out, step.truth()[0]) < TOLERANCE


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
    out = backend.forward(small.q, cache, builder.build(far), softmax_scale=SCALE).out
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
