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
    from collections.abc import Callable

    from mla_decode_contract.context import CaseContext

STEPS = 12
WARM_STEPS, MEMORY_STEPS = 9, 50


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
    """Torch raises at the first wait; `build` must wait where the builder declares it."""
    scene = draw_scene(ctx, ctx.problem(), [20, 300])
    builder = ctx.builder(scene.problem)
    check(scene, decode(scene, builder), label="warm ")
    out, lse = output_buffers(scene)
    buffers = {"out": out.tensor, **({"lse": lse.tensor} if lse is not None else {})}
    declared = builder.host_reads_lengths
    waited = first_wait(lambda: builder.build(scene.common))
    if declared and waited is None:
        raise ValueViolation(
            "the builder declares host_reads_lengths, yet build does not wait: the "
            "declaration costs engines a backend that they could use"
        )
    if waited is not None and not declared:
        raise ValueViolation(
            f"build waits for the device, and host_reads_lengths is not declared: {waited}"
        )
    if declared:
        ctx.notes.append("build waits for the device, as host_reads_lengths declares")
    metadata = builder.build(scene.common)
    waited = first_wait(lambda: forward(scene, metadata, **buffers))
    if waited is not None:
        raise ValueViolation(f"forward waits for the device: {waited}")


def first_wait(step: Callable[[], object]) -> str | None:
    """What torch says of the first wait of a step for the device; None: it has none."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


@implements("sync.device_memory_bounded")
def device_memory_bounded(ctx: CaseContext) -> None:
    """Bytes in use and the allocator's requests, after warm steps and after many."""
    problem = ctx.problem()
    scenes = [draw_scene(ctx, problem, lens) for lens in ([20, 45], [300, 1])]
    builder = ctx.builder(problem)
    out, lse = output_buffers(scenes[0])
    buffers = {"out": out.tensor, **({"lse": lse.tensor} if lse is not None else {})}
    told = []
    for step in range(MEMORY_STEPS):
        scene = scenes[step % 2]
        forward(scene, builder.build(scene.common), **buffers)
        if step in {WARM_STEPS, MEMORY_STEPS - 1}:
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            told.append(
                {
                    "bytes": torch.cuda.memory_allocated(),
                    "driver_calls": stats.get("num_device_alloc", 0),
                    "requests": stats.get("allocation.all.allocated", 0),
                }
            )
    steps = MEMORY_STEPS - WARM_STEPS - 1
    requests = (told[1]["requests"] - told[0]["requests"]) / steps
    ctx.notes.append(f"allocations a step: {requests:g}; {told[1]['bytes']} bytes held")
    for what in ("bytes", "driver_calls"):
        require(
            told[1][what] <= told[0][what],
            f"{what} went from {told[0][what]} to {told[1][what]} over {steps} steps",
        )
