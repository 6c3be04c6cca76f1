"""LSE: natural logarithm, float32, only where asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode_contract.call import decode, forward
from mla_decode_contract.cases.common import serve
from mla_decode_contract.demand import demand_error
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext


@implements("lse.natural_log")
def natural_log(ctx: CaseContext) -> None:
    """Lengths whose logarithms differ."""
    serve(ctx, ctx.problem(needs_lse=True), [1, 20, 300])


@implements("lse.large_scores")
def large_scores(ctx: CaseContext) -> None:
    """Forty times the usual query: peaks of some two hundred."""
    serve(ctx, ctx.problem(needs_lse=True), [20, 100], q_gain=40.0)


@implements("lse.absent_when_not_asked")
def absent(ctx: CaseContext) -> None:
    """Nothing is paid for it, nothing is returned."""
    problem = ctx.problem(needs_lse=False)
    scene = draw_scene(ctx, problem, [20])
    result = decode(scene)
    require(result.lse is None, "lse was returned though the problem asks for none")


@implements("lse.buffer_refused_when_not_asked")
def buffer_refused(ctx: CaseContext) -> None:
    """A buffer that would stay unfilled."""
    problem = ctx.problem(needs_lse=False)
    scene = draw_scene(ctx, problem, [20])
    metadata = ctx.builder(problem).build(scene.common)
    buffer = torch.empty((1, problem.num_q_heads), device=ctx.torch_device)
    demand_error(
        ValueError, "an lse buffer", lambda: forward(scene, metadata, lse=buffer)
    )
