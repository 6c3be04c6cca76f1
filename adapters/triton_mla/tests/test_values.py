"""The kernels, interpreted on the CPU, against float64."""

from dataclasses import replace

import pytest
import torch
from triton_steps import make_step, relative_error

from mla_decode import DecodeProblem, DeviceInfo, Mask
from mla_decode_triton import chosen_backend

backend = chosen_backend("portable")
TOLERANCE = 4e-3
"""The interpreter truncates where a GPU rounds to bfloat16: twice a GPU's error."""

NARROW, WIDE = DeviceInfo.assume("gfx942"), DeviceInfo.assume("sm_90")
CASES = [
    # device, H, Q, page, kv, causal, lengths
    pytest.param(NARROW, 1, 1, 16, "bf16", True, [1, 33], id="one_row"),
    pytest.param(NARROW, 16, 1, 64, "bf16", True, [64, 128], id="whole_pages"),
    pytest.param(NARROW, 5, 3, 1, "bf16", True, [3, 40, 70], id="page_of_one_token"),
    pytest.param(NARROW, 5, 3, 1, "bf16", False, [3, 40, 70], id="non_causal_block"),
    pytest.param(NARROW, 3, 7, 32, "bf16", True, [90, 7], id="rows_in_two_tiles"),
    pytest.param(NARROW, 2, 32, 128, "bf16", True, [130, 32], id="longest_block"),
    pytest.param(NARROW, 12, 2, 16, "fp16", False, [31, 2], id="fp16"),
    pytest.param(NARROW, 16, 1, 16, "fp8", True, [50, 1], id="fp8_fnuz"),
    pytest.param(WIDE, 128, 1, 64, "bf16", True, [65, 200], id="most_heads"),
    pytest.param(WIDE, 16, 8, 64, "bf16", False, [100, 8], id="detached_non_causal"),
    pytest.param(WIDE, 16, 8, 16, "bf16", True, [100, 8], id="detached_causal"),
    pytest.param(WIDE, 20, 2, 32, "fp8", True, [70, 2], id="fp8_fn"),
    pytest.param(WIDE, 5, 3, 64, "fp8", True, [70, 3], id="fp8_scaled_rows"),
]


@pytest.mark.parametrize(
    ("device", "heads", "query_len", "page_size", "kv_dtype", "causal", "lengths"),
    CASES,
)
def test_agrees_with_float64(
    device, heads, query_len, page_size, kv_dtype, causal, lengths
):
    q_dtype = "fp16" if kv_dtype == "fp16" else "bf16"
    problem = DecodeProblem(
        num_q_heads=heads,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        out_dtype=q_dtype,
        page_size=page_size,
        query_lens=frozenset({query_len}),
        masks=frozenset(Mask),
        needs_lse=True,
        max_num_reqs=4,
        max_model_len=512,
    )
    assert backend.refusals(problem, device) == []
    step = make_step(problem, device, [*lengths, 0], query_len=query_len, causal=causal)
    builder = backend.builder_cls(problem, device)
    builder.partial_out.fill_(torch.nan)
    builder.partial_lse.fill_(torch.nan)

    out, lse = step.run(builder)

    truth, true_lse = step.oracle()
    assert relative_error(out, truth) < TOLERANCE
    assert torch.equal(lse.isinf(), true_lse.isinf())
    live = ~true_lse.isinf()
    torch.testing.assert_close(lse[live].double(), true_lse[live], atol=2e-4, rtol=0)
    assert not out[-query_len:].any()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_truth_of_a_gpu_is_the_oracle_s(kv_dtype, causal):
    problem = DecodeProblem(num_q_heads=3, kv_dtype=kv_dtype, page_size=16)
    drawn = make_step(problem, WIDE, [40, 4, 0], query_len=4, causal=not causal)
    step = drawn.under(causal=causal)
    for found, right in zip(step.truth(), step.oracle(), strict=True):
        torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-12)


def test_takes_a_pair_without_joining_it():
    problem = DecodeProblem(
        num_q_heads=4, page_size=16, max_num_reqs=2, max_model_len=64
    )
    step = make_step(problem, NARROW, [40], query_len=1, causal=True)
    builder = backend.builder_cls(problem, NARROW)
    joined = step.run(builder).out

    pair = backend.forward(
        (step.q[..., :512].contiguous(), step.q[..., 512:].contiguous()),
        step.kv_cache,
        builder.build(step.common),
        softmax_scale=192**-0.5,
    )

    assert torch.equal(pair.out, joined)
    assert builder._joined is None


def test_walks_pages_that_lie_apart():
    stride = 16 * 576 + 40
    problem = DecodeProblem(
        num_q_heads=4,
        page_size=16,
        kv_page_stride=stride,
        max_num_reqs=2,
        max_model_len=64,
    )
    step = make_step(problem, NARROW, [40, 17], query_len=1, causal=True, stride=stride)

    out = step.run(backend.builder_cls(problem, NARROW)).out

    assert relative_error(out, step.oracle()[0]) < TOLERANCE


def test_writes_a_dtype_that_is_not_the_query_s():
    problem = DecodeProblem(
        num_q_heads=4, out_dtype="fp32", page_size=16, max_num_reqs=1, max_model_len=64
    )
    step = make_step(problem, NARROW, [40], query_len=1, causal=True)

    out = step.run(backend.builder_cls(problem, NARROW)).out

    assert out.dtype == torch.float32
    assert relative_error(out, step.oracle()[0]) < 1e-5


@pytest.mark.parametrize("odd", ["address", "page_stride"])
def test_walks_an_fp8_cache_whose_pairs_are_not_aligned(odd):
    packed = 16 * 576
    stride = packed + 1 if odd == "page_stride" else packed
    problem = DecodeProblem(
        num_q_heads=4,
        kv_dtype="fp8",
        page_size=16,
        kv_page_stride=stride,
        max_num_reqs=2,
        max_model_len=64,
    )
    step = make_step(problem, WIDE, [40, 17], query_len=1, causal=True, stride=stride)
    if odd == "address":
        cache = step.kv_cache
        storage = torch.empty(cache.numel() + 1, dtype=cache.dtype)
        moved = storage[1 - storage.data_ptr() % 2 :][: cache.numel()]
        step = replace(step, kv_cache=moved.view(cache.shape).copy_(cache))
        assert step.kv_cache.data_ptr() % 2

    out = step.run(backend.builder_cls(problem, WIDE)).out

    assert relative_error(out, step.oracle()[0]) < TOLERANCE


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e30])
def test_scaled_rows_hold_what_float16_could_not(magnitude):
    problem = DecodeProblem(
        num_q_heads=2,
        kv_dtype="fp8",
        page_size=16,
        needs_lse=True,
        max_num_reqs=1,
        max_model_len=64,
    )
    step = make_step(problem, WIDE, [40], query_len=1, causal=True)
    step.q[:, 1] *= magnitude
    builder = backend.builder_cls(problem, WIDE)

    out, lse = step.run(builder)

    truth, true_lse = step.oracle()
    assert relative_error(out, truth) < TOLERANCE
    torch.testing.assert_close(lse.double(), true_lse, atol=2e-4, rtol=1e-5)


def test_a_step_s_launches_are_bound_once_a_shape():
    problem = DecodeProblem(
        num_q_heads=4, page_size=16, max_num_reqs=2, max_model_len=64
    )
    builder = backend.builder_cls(problem, NARROW)
    long = make_step(problem, NARROW, [40, 17], query_len=1, causal=True)
    short = make_step(problem, NARROW, [33, 2], query_len=1, causal=True)
    lone = make_step(problem, NARROW, [40], query_len=1, causal=True)

    steps = [builder.build(step.common).step for step in (long, short, lone)]

    assert steps[0] is steps[1]
    assert steps[2] is not steps[0]
    for step in (short, lone):
        out, _ = step.run(builder)
        assert relative_error(out, step.oracle()[0]) < TOLERANCE
