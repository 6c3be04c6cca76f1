"""SYNC: no waiting, no growth."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from mla_decode_contract.call import check, decode, forward, output_buffers
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import ValueViolation, require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext

STEPS = 12


@implements("sync.allocations_bounded")
def allocations_bounded(ctx: CaseContext) -> None:
    """Tensors alive after the third step and after the last."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    builder = ctx.builder(problem)
    out, lse = output_buffers(scene)
    buffers = {"out": out.tensor, **({"lse": lse.tensor} if lse is not None else {})}
    counts = []
    for step in range(STEPS):
        forward(scene, builder.build(scene.common), **buffers)
        if step in {2, STEPS - 1}:
            counts.append(_alive())
    ctx.notes.append(f"tensors alive after step 3 and {STEPS}: {counts}")
    require(
        counts[1] <= counts[0],
        f"{counts[1] - counts[0]} more tensors are alive after {STEPS - 3} more steps",
    )


def _alive() -> int:
    gc.collect()
    kind = torch.Tensor
    return sum(1 for thing in gc.get_objects() if type(thing) is kind)


@implements("sync.no_synchronisation")
def no_synchronisation(ctx: CaseContext) -> None:
    """Torch raises at the first wait."""
    scene = draw_scene(ctx, ctx.problem(), [20, 300])
    builder = ctx.builder(scene.problem)
    check(scene, decode(scene, builder), label="warm ")
    out, lse = output_buffers(scene)
    buffers = {"out": out.tensor, **({"lse": lse.tensor} if lse is not None else {})}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(scene, builder.build(scene.common), **buffers)
    except RuntimeError as error:
        raise ValueViolation(f"a step waits for the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
