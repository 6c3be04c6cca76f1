"""UBATCH: builders that run side by side, batches that are split."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mla_decode.errors import BatchError
from mla_decode.slicing import split_ubatches
from mla_decode_contract.call import Result, check, decode, forward
from mla_decode_contract.cases.common import (
    CAUSAL,
    NON_CAUSAL,
    block_problem,
    longer_block,
)
from mla_decode_contract.demand import demand_error
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext
    from mla_decode_contract.scene import Scene


@implements("ubatch.interleaved_lengths")
def interleaved_lengths(ctx: CaseContext) -> None:
    """Build A, build B, run B, run A, run B, run A."""
    problem = ctx.problem()
    scenes = [draw_scene(ctx, problem, lens) for lens in ([20, 45], [130, 7, 33])]
    _interleave(ctx, scenes)


@implements("ubatch.interleaved_masks")
def interleaved_masks(ctx: CaseContext) -> None:
    """One causal, one not, both of the same shape."""
    query_len = longer_block(ctx, causal=False)
    problem = ctx.problem(query_lens=(query_len,), masks=(*CAUSAL, *NON_CAUSAL))
    scenes = [
        draw_scene(ctx, problem, [10, 17], causal=causal) for causal in (True, False)
    ]
    _interleave(ctx, scenes)
    _interleave(ctx, scenes[::-1])


def _interleave(ctx: CaseContext, scenes: list[Scene]) -> None:
    builders = [ctx.builder(scene.problem) for scene in scenes]
    built = [
        builder.build(scene.common)
        for builder, scene in zip(builders, scenes, strict=True)
    ]
    for turn in (1, 0, 1, 0):
        result = decode(scenes[turn], metadata=built[turn])
        check(scenes[turn], result, label=f"ubatch {turn} ")


@implements("ubatch.split_keeps_fields")
def split_keeps_fields(ctx: CaseContext) -> None:
    """Two halves of four requests, one of them empty, and a pad."""
    problem = ctx.problem()
    _split(ctx, draw_scene(ctx, problem, [20, 45, 0, 33], num_pads=1))


@implements("ubatch.split_keeps_mask")
def split_keeps_mask(ctx: CaseContext) -> None:
    """Halves of a non-causal batch."""
    query_len = longer_block(ctx, causal=False)
    problem = block_problem(ctx, query_len, causal=False)
    _split(ctx, draw_scene(ctx, problem, [10, 12, 33, 7], causal=False))


def _split(ctx: CaseContext, scene: Scene) -> None:
    parts = split_ubatches(scene.common, 2)
    results, first = [], 0
    metadata = [ctx.builder(scene.problem).build(part) for part in parts]
    for built in metadata:
        rows = built.num_decode_tokens
        part = replace(scene, q=scene.q[first : first + rows])
        results.append(forward(part, built))
        first += rows
    require(first == scene.num_rows, "the parts' rows do not add up to the batch's")
    lses = [result.lse for result in results if result.lse is not None]
    whole = Result(
        out=torch.cat([result.out for result in results]),
        lse=torch.cat(lses) if lses else None,
    )
    check(scene, whole, label="split ")


@implements("ubatch.cut_in_block_refused")
def cut_in_block(ctx: CaseContext) -> None:
    """Row 1 of blocks of several tokens."""
    query_len = longer_block(ctx, causal=True)
    problem = block_problem(ctx, query_len, causal=True)
    scene = draw_scene(ctx, problem, [10, 12])
    demand_error(
        BatchError, "a cut at row 1", lambda: split_ubatches(scene.common, [1])
    )


@implements("ubatch.no_global_state")
def no_global_state(ctx: CaseContext) -> None:
    """Before and after two builds and two calls."""
    scene = draw_scene(ctx, ctx.problem(), [20, 45])
    builder = ctx.builder(scene.problem)
    check(scene, decode(scene, builder), label="warm ")
    before = _global_state()
    check(scene, decode(scene, builder))
    check(scene, decode(scene, ctx.builder(scene.problem)), label="second builder ")
    after = _global_state()
    changed = sorted(key for key in before if before[key] != after[key])
    require(not changed, f"a step changed {', '.join(changed)}")


def _global_state() -> dict[str, object]:
    return {
        "os.environ": dict(os.environ),
        "the default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the matmul precision": torch.get_float32_matmul_precision(),
        "the working directory": str(os.getcwd()),  # noqa: PTH109 - a string to compare
        "the random state": torch.random.get_rng_state().sum().item(),
    }


@implements("ubatch.current_stream")
def current_stream(ctx: CaseContext) -> None:
    """On a side stream, with the inputs written there just before."""
    scene = draw_scene(ctx, ctx.problem(), [20, 300])
    builder = ctx.builder(scene.problem)
    keep_q = scene.q.clone()
    check(scene, decode(scene, builder), label="warm ")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch declares none
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        scene.q.fill_(0)
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call] # noqa: SLF001 - torch's own way to occupy a stream
        scene.q.copy_(keep_q)
        result = decode(scene, builder)
        check(scene, result)
