"""EMPTY: rows without a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode_contract.call import check, decode
from mla_decode_contract.cases.common import block_problem, longer_block, serve
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext


@implements("empty.one_request")
def one_request(ctx: CaseContext) -> None:
    """Between two requests that have keys."""
    serve(ctx, ctx.problem(), [20, 0, 45])


@implements("empty.all_requests")
def all_requests(ctx: CaseContext) -> None:
    """No key anywhere."""
    serve(ctx, ctx.problem(), [0, 0])


@implements("empty.block")
def block(ctx: CaseContext) -> None:
    """All rows of a block."""
    query_len = longer_block(ctx, causal=True, wanted=3)
    serve(ctx, block_problem(ctx, query_len, causal=True), [0, 20])


@implements("empty.non_causal_block")
def non_causal_block(ctx: CaseContext) -> None:
    """All rows of a non-causal block."""
    query_len = longer_block(ctx, causal=False, wanted=3)
    problem = block_problem(ctx, query_len, causal=False)
    serve(ctx, problem, [0, 20], causal=False)


@implements("empty.others_next_step")
def others_next_step(ctx: CaseContext) -> None:
    """The same shape with other lengths, other pages and other requests empty."""
    problem = ctx.problem()
    builder = ctx.builder(problem)
    earlier = ""
    for lens in ([9, 0, 20], [0, 17, 5], [3, 11, 0], [4, 6, 2], [0, 0, 7]):
        scene = draw_scene(ctx, problem, lens)
        label = f"lengths {lens}{earlier}: "
        check(scene, decode(scene, builder), label=label)
        earlier = f" after {lens}"
