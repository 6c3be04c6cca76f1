"""LENGTHS: what seq_len may be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mla_decode.errors import BatchError
from mla_decode_contract.cases.common import block_problem, longer_block, serve
from mla_decode_contract.demand import demand_error
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext

MOST_KEYS = 300
MANY = 70
"""Requests of a large batch."""


@implements("lengths.ragged_requests")
def ragged_requests(ctx: CaseContext) -> None:
    """Short and long together."""
    serve(ctx, ctx.problem(), [1, 300, 17, 128])


@implements("lengths.many_requests")
def many_requests(ctx: CaseContext) -> None:
    """More than the lanes of a warp or a wave, and than a few blocks of a grid."""
    limit = ctx.row.max_num_reqs
    count = MANY if limit is None else min(MANY, limit)
    lens = [0 if at % 9 == 4 else 1 + at * 7 % 23 for at in range(count)]
    serve(ctx, ctx.problem(max_num_reqs=count), lens)


@implements("lengths.page_multiples")
def page_multiples(ctx: CaseContext) -> None:
    """Around one and two pages."""
    problem = ctx.problem()
    if problem.page_size > MOST_KEYS // 2:
        lens = [problem.page_size - 1, problem.page_size, problem.page_size + 1]
        problem = replace(problem, max_model_len=max(512, *lens))
    else:
        size = problem.page_size
        lens = [max(1, size - 1), size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1]
    serve(ctx, problem, lens)


@implements("lengths.one_key")
def one_key(ctx: CaseContext) -> None:
    """The softmax over one key is 1."""
    serve(ctx, ctx.problem(), [1, 1])


@implements("lengths.non_causal_shorter_than_block")
def non_causal_shorter(ctx: CaseContext) -> None:
    """Blocks of several tokens over fewer keys."""
    query_len = longer_block(ctx, causal=False, wanted=5)
    problem = block_problem(ctx, query_len, causal=False)
    serve(ctx, problem, [1, query_len - 1, query_len, 20], causal=False)


@implements("lengths.causal_shorter_refused")
def causal_shorter(ctx: CaseContext) -> None:
    """Every sequence is shorter than the block, and the host can know it."""
    query_len = longer_block(ctx, causal=True, wanted=4)
    problem = block_problem(ctx, query_len, causal=True)
    scene = draw_scene(ctx, problem, [query_len, query_len])
    common = scene.with_common(
        max_seq_len=query_len - 1, seq_lens=scene.common.seq_lens - 1
    )
    builder = ctx.builder(problem)
    demand_error(
        BatchError, "a causal block past its sequence", lambda: builder.build(common)
    )
