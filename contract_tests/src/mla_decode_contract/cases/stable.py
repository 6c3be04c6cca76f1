"""STABLE: addresses that graphs record, and a workspace sized at construction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mla_decode.builder import GraphSupport
from mla_decode.errors import BackendRefused
from mla_decode.workspace import core_bytes
from mla_decode_contract.call import Result, check, decode, forward, output_buffers
from mla_decode_contract.demand import demand_error, require_code
from mla_decode_contract.reachable import on_device, storages, tensors
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mla_decode.problem import DecodeProblem
    from mla_decode_contract.context import CaseContext
    from mla_decode_contract.scene import Scene

GROWING_STEPS = 60
VALUES_EVERY = 12
"""Steps between two whose values are compared: an interpreter is slow."""


@implements("stable.capture_needs_graphs")
def capture_needs_graphs(ctx: CaseContext) -> None:
    """The engine forgot to say graphs=True."""
    problem = ctx.problem(graphs=False)
    scene = draw_scene(ctx, problem, [20])
    builder = ctx.builder(problem)
    error = demand_error(
        BackendRefused,
        "a capture of a problem without graphs",
        lambda: builder.build_for_capture(scene.common),
    )
    if isinstance(error, BackendRefused):
        require_code(error.codes, frozenset({"feature"}), "build_for_capture()")


@implements("stable.addresses")
def addresses(ctx: CaseContext) -> None:
    """Tensors of the metadata before and after builds of other lengths."""
    problem = ctx.problem(graphs=True)
    require(
        ctx.backend.builder_cls.graph_support is not GraphSupport.NEVER,
        "graphs are declared, but the builder's graph_support is NEVER",
    )
    builder = ctx.builder(problem)
    scene = draw_scene(ctx, problem, [20, 45])
    captured = builder.build_for_capture(scene.common)
    before = _addresses(captured)
    for lens in ([21, 46], [300, 1], [0, 33]):
        later = draw_scene(ctx, problem, lens)
        metadata = builder.build(later.common)
        check(later, decode(later, metadata=metadata), label=f"{lens} ")
        after = _addresses(metadata)
        moved = sorted(name for name in before if after.get(name) != before[name])
        require(not moved, f"a later build moved or reshaped {', '.join(moved)}")


@implements("stable.growing_builds")
def growing_builds(ctx: CaseContext) -> None:
    """Sixty builds of ever longer requests, some of them decoded."""
    problem = ctx.problem(graphs=True)
    builder = ctx.builder(problem)
    before = _addresses(builder.build_for_capture(_grown(ctx, problem, 0).common))
    for step in range(GROWING_STEPS):
        later = _grown(ctx, problem, step)
        metadata = builder.build(later.common)
        after = _addresses(metadata)
        moved = sorted(name for name in before if after.get(name) != before[name])
        require(not moved, f"build {step + 1} moved or reshaped {', '.join(moved)}")
        if step % VALUES_EVERY == VALUES_EVERY - 1:
            result = decode(later, metadata=metadata)
            check(later, result, label=f"step {step + 1} ")


def _grown(ctx: CaseContext, problem: DecodeProblem, step: int) -> Scene:
    return draw_scene(ctx, problem, [1 + step, 2 + 5 * step])


def _addresses(metadata: object) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {
        name: (tensor.data_ptr(), tuple(tensor.shape))
        for name, tensor in tensors(_fields(metadata))
    }


def _fields(metadata: object) -> dict[str, object]:
    names = [n for cls in type(metadata).__mro__ for n in getattr(cls, "__slots__", ())]
    found = {name: getattr(metadata, name, None) for name in names}
    found.update(getattr(metadata, "__dict__", {}))
    found.pop("builder", None)
    return found


@implements("stable.workspace_size")
def workspace_size(ctx: CaseContext) -> None:
    """Bytes under the builder after a short and after a long step."""
    problem = ctx.problem()
    builder = ctx.builder(problem)
    sizes = []
    for lens in ([2, 2], [3, 1], [300, 150], [2, 2]):
        scene = draw_scene(ctx, problem, lens)
        check(scene, decode(scene, builder))
        sizes.append(_bytes_of(builder, scene))
    ctx.notes.append(f"bytes under the builder by step: {sizes}")
    require(
        sizes[2] <= max(sizes[0], sizes[1]) and sizes[3] <= sizes[2],
        f"the builder's tensors grew with the lengths: {sizes} bytes",
    )


def _bytes_of(builder: object, scene: Scene) -> int:
    """Bytes under a builder; a view of the step's own query or cache is not its own."""
    given = storages((scene.q, scene.kv_cache))
    return sum(size for at, size in storages(builder).items() if at not in given)


@implements("stable.workspace_is_declared")
def workspace_is_declared(ctx: CaseContext) -> None:
    """Bytes on the device, the engine's tensors and core's own part left out."""
    problem = ctx.problem()
    builder = ctx.builder(problem)
    scene = draw_scene(ctx, problem, [300, *([20] * (problem.max_num_reqs - 1))])
    check(scene, decode(scene, builder))
    lent = storages((scene.q, scene.kv_cache, scene.common))
    own = on_device(builder, ctx.torch_device)
    held = sum(size for at, size in own.items() if at not in lent)
    held -= core_bytes(problem, joins=False)
    declared = ctx.backend.cost(problem, ctx.device).workspace_bytes
    ctx.notes.append(f"bytes held: {held}, declared: {declared}")
    require(
        held <= declared,
        f"the builder holds {held} bytes of device memory beside core's, its cost "
        f"says workspace_bytes={declared}",
    )


@implements("stable.replay")
def replay(ctx: CaseContext) -> None:
    """Capture once, build other lengths, replay."""
    _replay(ctx, ([21, 46], [300, 1], [0, 128]))


@implements("stable.replay_growing")
def replay_growing(ctx: CaseContext) -> None:
    """Sixty replays, each over one more key and five more."""
    _replay(ctx, [[1 + step, 2 + 5 * step] for step in range(GROWING_STEPS)])


def _replay(ctx: CaseContext, steps: Iterable[list[int]]) -> None:
    problem = ctx.problem(graphs=True)
    builder = ctx.builder(problem)
    scene = draw_scene(ctx, problem, [20, 45])
    out, lse = output_buffers(scene)
    buffers = {"out": out.tensor, **({"lse": lse.tensor} if lse is not None else {})}
    metadata = builder.build_for_capture(scene.common)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch declares none
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward(scene, metadata, **buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(scene, metadata, **buffers)
    for lens in steps:
        later = draw_scene(ctx, problem, lens)
        # The graph reads the captured query and cache: only lengths and table change.
        table = later.common.block_table_tensor
        wrapped = torch.where(table >= 0, table % scene.kv_cache.shape[0], table)
        cache = scene.kv_cache
        cache.copy_(torch.randn_like(cache.float()).to(cache.dtype))
        same = replace(
            later,
            q=scene.q,
            kv_cache=cache,
            common=later.with_common(block_table_tensor=wrapped),
        )
        builder.build(same.common)
        graph.replay()
        torch.cuda.synchronize()
        result = Result(out=out.tensor, lse=None if lse is None else lse.tensor)
        check(same, result, label=f"replay {lens} ")
        out.check("out")
        if lse is not None:
            lse.check("lse")
