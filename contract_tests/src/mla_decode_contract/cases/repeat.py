"""REPEAT: the same inputs, the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode_contract.call import Result, check, decode
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext

TIMES = 4


@implements("repeat.bit_equal")
def bit_equal(ctx: CaseContext) -> None:
    """One builder, one metadata."""
    scene = draw_scene(ctx, ctx.problem(), [20, 0, 300])
    metadata = ctx.builder(scene.problem).build(scene.common)
    _compare(ctx, [decode(scene, metadata=metadata) for _ in range(TIMES)])
    check(scene, decode(scene, metadata=metadata))


@implements("repeat.across_builders")
def across_builders(ctx: CaseContext) -> None:
    """A builder each."""
    scene = draw_scene(ctx, ctx.problem(), [20, 0, 300])
    _compare(ctx, [decode(scene) for _ in range(2)])


def _compare(ctx: CaseContext, results: list[Result]) -> None:
    first = results[0]
    equal = all(_same(first.out, other.out) for other in results[1:])
    if first.lse is not None:
        equal &= all(
            other.lse is not None and _same(first.lse, other.lse)
            for other in results[1:]
        )
    if not ctx.backend.deterministic:
        ctx.notes.append(f"declared not deterministic; bits were equal: {equal}")
        return
    require(equal, "the same inputs gave other bits, and deterministic is True")


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )
