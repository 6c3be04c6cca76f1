"""Queries and caches in every layout that the contract admits."""

from dataclasses import replace

import pytest
import torch

from mla_decode import Mask, MLADecoder
from mla_decode.reference.oracle import decode_oracle
from mla_decode.workspace import core_bytes, held_bytes
from mla_decode_cuda_flashmla import backend


@pytest.mark.parametrize("layout", ["strided", "odd address", "padded rows"])
def test_a_query_that_the_copy_engine_cannot_read_is_copied_first(kit, layout):
    problem = kit.problem(query_lens={2}, needs_lse=True)
    step = kit.step(problem, [70, 33], 2)
    q = step.q
    if layout == "strided":
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "padded rows":
        q = torch.cat([q, q[..., :3]], dim=-1)[..., :576]
    else:
        room = torch.empty(q.numel() + 1, dtype=q.dtype)
        q = room[1:].view(q.shape).copy_(q)
    kit.check(kit.run(replace(step, q=q), problem), step)


def test_a_pair_is_joined(kit):
    problem = kit.problem(query_lens={2}, needs_lse=True)
    step = kit.step(problem, [70, 33, 0], 2)
    builder = backend.builder_cls(problem, kit.assumed())
    pair = step.q[..., :512].clone(), step.q[..., 512:].clone()
    output = backend.forward(
        pair, step.kv, builder.build(step.common), softmax_scale=kit.SCALE
    )
    kit.check(output, step)
    joined = 8 * 2 * 16 * 576 * 2
    assert core_bytes(problem, joins=True) - core_bytes(problem, joins=False) == joined
    own = backend.cost(problem, kit.assumed()).workspace_bytes
    held = held_bytes(builder, borrowed=[step.kv])
    assert held == core_bytes(problem, joins=True) + own


def test_pages_may_lie_apart(kit):
    stride = 64 * 576 + 8
    problem = kit.problem(needs_lse=True, kv_page_stride=stride)
    step = kit.step(problem, [70, 300])
    pages = step.kv.shape[0]
    room = torch.full((pages, stride), float("nan"), dtype=torch.bfloat16)
    apart = room.as_strided((pages, 64, 576), (stride, 576, 1))
    apart.copy_(step.kv)
    kit.check(kit.run(replace(step, kv=apart), problem), step)


def test_a_cache_of_one_page_may_have_any_stride(kit):
    problem = kit.problem(needs_lse=True)
    step = kit.step(problem, [40])
    page = step.kv[int(step.common.block_table_tensor[0, 0])].clone()
    one = page.as_strided((1, 64, 576), (7, 576, 1))
    table = torch.zeros_like(step.common.block_table_tensor)
    single = replace(
        step, kv=one, common=replace(step.common, block_table_tensor=table)
    )
    kit.check(kit.run(single, problem), single)


def test_a_table_of_one_column_may_be_strided(kit):
    problem = kit.problem(needs_lse=True)
    step = kit.step(problem, [40, 64])
    wide = step.common.block_table_tensor[:, :1].repeat(1, 2)
    narrow = wide[:, ::2]
    assert narrow.stride(1) == 2
    single = replace(step, common=replace(step.common, block_table_tensor=narrow))
    kit.check(kit.run(single, problem), step)


@pytest.mark.parametrize("query_len", [2, 7])
def test_a_non_causal_block_is_served_by_an_exact_lowering(kit, query_len):
    problem = kit.problem(
        query_lens={query_len}, masks={Mask.NON_CAUSAL}, needs_lse=True
    )
    step = kit.step(problem, [70, query_len, 300], query_len)
    decoder = MLADecoder(
        problem, "cuda_flashmla", lowering="exact", device=kit.assumed()
    )
    common = replace(step.common, causal=False)
    output = decoder.run(step.q, step.kv, decoder.plan(common), softmax_scale=kit.SCALE)
    out, lse = decode_oracle(
        step.q,
        step.kv,
        common.block_table_tensor,
        common.seq_lens,
        common.query_start_loc,
        causal=False,
        softmax_scale=kit.SCALE,
    )
    assert (output.out.double() - out).norm() <= 6e-3 * out.norm()
    torch.testing.assert_close(output.lse.double(), lse, rtol=0, atol=2e-4)
    assert decoder.selection.plan.kind != "native"
