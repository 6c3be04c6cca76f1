"""Values, LSE and empty rows against the float64 oracle, in every form of the library."""

import math
from dataclasses import replace

import pytest
import torch

from mla_decode.reference.oracle import decode_oracle
from mla_decode_cuda_flashmla import backend
from mla_decode_cuda_flashmla.simulator import sched_meta_api

CASES = [
    ("sched_meta", "bf16"),
    ("sched_meta", "fp16"),
    ("tile_metadata", "bf16"),
    ("sgl", "bf16"),
    ("sgl", "fp8"),
]
SHAPES = [
    (16, 1, [5, 200, 700, 0]),
    (16, 4, [4, 64, 65, 1000, 0, 0]),
    (3, 5, [130, 127, 9]),
    (128, 2, [3, 500]),
    (1, 65, [65, 300]),
]


@pytest.mark.parametrize(("heads", "query_len", "lens"), SHAPES)
@pytest.mark.parametrize(("release", "dtype"), CASES)
def test_every_row_agrees_with_the_oracle(kit, release, dtype, heads, query_len, lens):
    problem = kit.problem(
        num_q_heads=heads, q_dtype=dtype, query_lens={query_len}, needs_lse=True
    )
    step = kit.step(problem, lens, query_len)
    kit.check(kit.run(step, problem, kit.assumed(release)), step, dtype)


@pytest.mark.parametrize("slot", [-1, 2147480000])
@pytest.mark.parametrize(("release", "dtype"), CASES)
def test_unused_slots_may_hold_anything_even_where_a_request_is_empty(
    kit, release, dtype, slot
):
    problem = kit.problem(q_dtype=dtype, needs_lse=True)
    step = kit.step(problem, [0, 7, 0, 64], slot=slot)
    kit.check(kit.run(step, problem, kit.assumed(release)), step, dtype)


@pytest.mark.parametrize(("release", "dtype"), CASES)
def test_a_batch_of_pads_is_all_empty_even_with_a_table_without_columns(
    kit, release, dtype
):
    problem = kit.problem(q_dtype=dtype, needs_lse=True, query_lens={2})
    step = kit.step(problem, [0, 0], 2)
    narrow = replace(
        step.common, block_table_tensor=step.common.block_table_tensor[:, :0]
    )
    output = kit.run(replace(step, common=narrow), problem, kit.assumed(release))
    assert torch.equal(output.out, torch.zeros_like(output.out))
    assert output.lse is None or (output.lse == -math.inf).all()


def test_raw_lse_of_an_empty_row_would_poison_a_merge(kit):
    """EMPTY-05: the library says +inf; a merge of partial results needs -inf."""
    problem = kit.problem(needs_lse=True)
    step = kit.step(problem, [0, 7])
    _, raw = sched_meta_api.flash_mla_with_kvcache(
        q=step.q.view(2, 1, 16, 576),
        k_cache=step.kv.unsqueeze(2),
        block_table=step.common.block_table_tensor,
        cache_seqlens=step.common.seq_lens,
        head_dim_v=512,
        tile_scheduler_metadata=sched_meta_api.get_mla_metadata()[0],
        softmax_scale=kit.SCALE,
    )
    assert (raw[0] == math.inf).all()
    other = torch.zeros_like(raw)
    assert torch.logaddexp(raw, other)[0].isinf().all()
    ours = kit.run(step, problem).lse
    assert torch.equal(torch.logaddexp(ours[0], torch.zeros(16)), torch.zeros(16))


def test_lse_is_laid_out_by_token_and_head(kit):
    """LSE-09: the library answers [B, H, Q]; each element is compared."""
    problem = kit.problem(num_q_heads=3, query_lens={2}, needs_lse=True)
    step = kit.step(problem, [100, 37], 2)
    output = kit.run(step, problem)
    assert output.lse.shape == (4, 3)
    assert output.lse.is_contiguous()
    expected = step.oracle()[1]
    assert len(set(expected.flatten().tolist())) == 12
    torch.testing.assert_close(output.lse.double(), expected, rtol=0, atol=2e-4)


def test_without_need_of_lse_none_is_returned(kit):
    problem = kit.problem()
    assert kit.run(kit.step(problem, [9]), problem).lse is None


@pytest.mark.parametrize("release", ["sched_meta", "tile_metadata"])
def test_the_callers_outputs_are_filled_in_place(kit, release):
    problem = kit.problem(query_lens={2}, needs_lse=True)
    step = kit.step(problem, [70, 0], 2)
    out = torch.full((4, 16, 512), math.nan, dtype=torch.bfloat16)
    lse = torch.full((4, 16), math.nan)
    output = kit.run(step, problem, kit.assumed(release), out=out, lse=lse)
    assert output.out is out
    assert output.lse is lse
    kit.check(output, step)


def test_the_same_call_twice_is_bit_equal(kit):
    problem = kit.problem(query_lens={3}, needs_lse=True)
    step = kit.step(problem, [900, 64], 3)
    first, second = kit.run(step, problem), kit.run(step, problem)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)


@pytest.mark.parametrize("scale", [1e-6, 2.0**-10, 3e-4, 4.0])
def test_any_scale_hides_what_the_mask_hides(kit, scale):
    """Below 7e-4 the kernel's own hiding score stops hiding: q is rescaled."""
    problem = kit.problem(num_q_heads=1, query_lens={2}, needs_lse=True)
    step = kit.step(problem, [577], 2)
    builder = backend.builder_cls(problem, kit.assumed())
    output = backend.forward(
        step.q, step.kv, builder.build(step.common), softmax_scale=scale
    )
    common = step.common
    out, lse = decode_oracle(
        step.q,
        step.kv,
        common.block_table_tensor,
        common.seq_lens,
        common.query_start_loc,
        causal=True,
        softmax_scale=scale,
    )
    assert (output.out.double() - out).norm() <= 8e-3 * out.norm()
    torch.testing.assert_close(output.lse.double(), lse, rtol=0, atol=2e-4)
