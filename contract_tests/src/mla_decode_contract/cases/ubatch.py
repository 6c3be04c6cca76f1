"""UBATCH: builders that run side by side, batches that are split."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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
from mla_decode_contract.global_state import GlobalState, first_state
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode_contract.context import CaseContext
    from mla_decode_contract.scene import Scene

SIDE_STEPS = 8


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


@implements("ubatch.threads_in_turn")
def threads_in_turn(ctx: CaseContext) -> None:
    """Two threads with a builder each, one at a time; then they change places."""
    problem = ctx.problem()
    scenes = [draw_scene(ctx, problem, lens) for lens in ([20, 45], [130, 7, 33])]
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        threads = (first, second)
        builders = [thread.submit(ctx.builder, problem).result() for thread in threads]
        built = [
            thread.submit(builder.build, scene.common).result()
            for thread, builder, scene in zip(threads, builders, scenes, strict=True)
        ]
        for mine, turn in ((True, 1), (True, 0), (False, 1), (False, 0), (True, 1)):
            thread = threads[turn if mine else 1 - turn]
            result = thread.submit(decode, scenes[turn], metadata=built[turn]).result()
            whose = "its own" if mine else "the other's"
            check(scenes[turn], result, label=f"ubatch {turn} in {whose} thread ")


@implements("ubatch.threads")
def threads_at_once(ctx: CaseContext) -> None:
    """Two threads at the same time, a builder and a stream each."""
    problem = ctx.problem()
    scenes = [draw_scene(ctx, problem, lens) for lens in ([20, 45], [130, 7, 33])]
    for scene in scenes:
        check(scene, decode(scene), label="warm ")
    streams = [_side_stream() for _ in scenes]
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(_steps_on, stream, scene)
            for stream, scene in zip(streams, scenes, strict=True)
        ]
        finished = [one.result() for one in asked]
    torch.cuda.synchronize()
    for scene, results in zip(scenes, finished, strict=True):
        for step, result in enumerate(results):
            check(scene, result, label=f"step {step} ")


def _steps_on(stream: torch.cuda.Stream, scene: Scene) -> list[Result]:
    builder = scene.ctx.builder(scene.problem)
    with torch.cuda.stream(stream):
        return [forward(scene, builder.build(scene.common)) for _ in range(SIDE_STEPS)]


@implements("ubatch.two_streams")
def two_streams(ctx: CaseContext) -> None:
    """Steps of two builders dealt over two streams that are held up in turn."""
    problem = ctx.problem()
    scenes = [draw_scene(ctx, problem, lens) for lens in ([20, 45], [130, 7, 33])]
    builders = [ctx.builder(problem) for _ in scenes]
    for scene, builder in zip(scenes, builders, strict=True):
        check(scene, decode(scene, builder), label="warm ")
    streams = [_side_stream() for _ in scenes]
    results: list[list[Result]] = [[], []]
    for step in range(SIDE_STEPS):
        with torch.cuda.stream(streams[step % 2]):
            torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call] # noqa: SLF001 - torch's own way to occupy a stream
        for turn, scene in enumerate(scenes):
            with torch.cuda.stream(streams[turn]):
                metadata = builders[turn].build(scene.common)
                results[turn].append(forward(scene, metadata))
    torch.cuda.synchronize()
    for turn, scene in enumerate(scenes):
        for step, result in enumerate(results[turn]):
            check(scene, result, label=f"stream {turn} step {step} ")


def _side_stream() -> torch.cuda.Stream:
    """A stream that waits for what the current one was given so far."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch declares none
    stream.wait_stream(torch.cuda.current_stream())
    return stream


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
    """Steps from the state that the process had before its first case.

    An adapter that writes the same value at every step writes it here again, though
    other cases ran before. A library that is imported in the first step may set what
    it likes then: the steps that count come later, and its settings are put back.
    """
    first = first_state()
    scene = draw_scene(ctx, ctx.problem(), [20, 45])
    builder = ctx.builder(scene.problem)
    check(scene, decode(scene, builder), label="warm ")
    warm = GlobalState.now()
    try:
        changed = _changed_by_steps(scene, builder, first, warm)
    except Exception:  # noqa: BLE001 - a library may need what its import has set
        ctx.notes.append("compared from the first step on: before it, no step works")
        changed = _changed_by_steps(scene, builder, warm, warm)
    require(
        not changed,
        f"a step changed {', '.join(changed)}: every other builder, library and thread "
        "of the process has it too; keep it on the builder, or set it at import",
    )


def _changed_by_steps(
    scene: Scene,
    builder: MLADecodeMetadataBuilder,
    start: GlobalState,
    end: GlobalState,
) -> list[str]:
    """What two steps change that begin in one state; the process is left in another."""
    start.restore()
    try:
        check(scene, decode(scene, builder))
        other = scene.ctx.builder(scene.problem)
        check(scene, decode(scene, other), label="second builder ")
        return start.changed_by(GlobalState.now())
    finally:
        end.restore()


@implements("ubatch.current_stream")
def current_stream(ctx: CaseContext) -> None:
    """On a side stream, with the inputs written there just before."""
    scene = draw_scene(ctx, ctx.problem(), [20, 300])
    builder = ctx.builder(scene.problem)
    keep_q = scene.q.clone()
    check(scene, decode(scene, builder), label="warm ")
    stream = _side_stream()
    with torch.cuda.stream(stream):
        scene.q.fill_(0)
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call] # noqa: SLF001 - torch's own way to occupy a stream
        scene.q.copy_(keep_q)
        result = decode(scene, builder)
        check(scene, result)
