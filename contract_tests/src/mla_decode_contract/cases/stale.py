"""STALE: metadata is bound to the step that it was built for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mla_decode.errors import StaleMetadataError
from mla_decode.metadata import DecodeMetadata
from mla_decode.problem import ROW_WIDTH
from mla_decode.reference import ReferenceBackend
from mla_decode_contract.call import check, decode, forward
from mla_decode_contract.demand import demand_error
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext


@implements("stale.lengths_changed")
def lengths_changed(ctx: CaseContext) -> None:
    """Two builds, then the first one's metadata."""
    problem = ctx.problem()
    builder = ctx.builder(problem)
    scene = draw_scene(ctx, problem, [20, 45])
    old = builder.build(scene.common)
    check(scene, decode(scene, metadata=old))
    builder.build(draw_scene(ctx, problem, [21, 46]).common)
    demand_error(
        StaleMetadataError, "metadata of an earlier step", lambda: forward(scene, old)
    )


@implements("stale.table_changed")
def table_changed(ctx: CaseContext) -> None:
    """Same lengths, other pages."""
    problem = ctx.problem()
    builder = ctx.builder(problem)
    scene = draw_scene(ctx, problem, [20, 45])
    old = builder.build(scene.common)
    other = scene.common.block_table_tensor.flip(0).contiguous()
    builder.build(scene.with_common(block_table_tensor=other[-2:]))
    demand_error(
        StaleMetadataError, "metadata of another table", lambda: forward(scene, old)
    )


@implements("stale.rebuilt_is_current")
def rebuilt(ctx: CaseContext) -> None:
    """Lengths that grow step by step, over a page's edge."""
    problem = ctx.problem()
    builder = ctx.builder(problem)
    edge = problem.page_size
    for step in (-1, 0, 1, 40):
        length = min(max(1, edge + step), problem.max_model_len)
        scene = draw_scene(ctx, problem, [length, 33])
        check(scene, decode(scene, builder), label=f"seq_len {length} ")


@implements("stale.query_shape")
def query_shape(ctx: CaseContext) -> None:
    """One row more, one head more, one row less."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    metadata = ctx.builder(problem).build(scene.common)
    heads = problem.num_q_heads
    for rows, count in ((3, heads), (2, heads + 1), (1, heads)):
        q = torch.zeros((rows, count, ROW_WIDTH), device=ctx.torch_device)
        wrong = replace(scene, q=q.to(scene.q.dtype))
        demand_error(
            StaleMetadataError,
            f"a query of {rows} rows and {count} heads",
            partial(forward, wrong, metadata),
        )


@implements("stale.cache_geometry")
def cache_geometry(ctx: CaseContext) -> None:
    """Twice the page size, and a stride that the problem does not declare."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    metadata = ctx.builder(problem).build(scene.common)
    pages, size, width = scene.kv_cache.shape
    doubled = torch.zeros((pages, 2 * size, width), device=ctx.torch_device)
    gap = torch.zeros((pages, size + 1, width), device=ctx.torch_device)
    dtype = scene.kv_cache.dtype
    caches = {
        "pages of twice the size": doubled.to(dtype),
        "an undeclared page stride": gap.to(dtype)[:, :size],
    }
    for what, cache in caches.items():
        wrong = replace(scene, kv_cache=cache)
        demand_error(StaleMetadataError, what, partial(forward, wrong, metadata))


@implements("stale.foreign_metadata")
def foreign_metadata(ctx: CaseContext) -> None:
    """Metadata that no builder of the backend made."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    common = scene.common
    orphan = DecodeMetadata(
        block_table=common.block_table_tensor,
        seq_lens=common.seq_lens,
        query_start_loc=common.query_start_loc,
        max_seq_len=common.max_seq_len,
        num_reqs=common.num_reqs,
        num_decode_tokens=scene.num_rows,
    )
    demand_error(
        StaleMetadataError, "metadata of no builder", lambda: forward(scene, orphan)
    )
    if ctx.backend.name == "reference":
        ctx.notes.append("the reference has no other backend to borrow from")
        return
    foreign = ReferenceBackend().builder_cls(problem, ctx.device).build(common)
    demand_error(
        StaleMetadataError,
        "metadata of another backend's builder",
        lambda: forward(scene, foreign),
    )


@implements("stale.layers_share")
def layers_share(ctx: CaseContext) -> None:
    """Three layers: own query, own cache, one metadata."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    metadata = ctx.builder(problem).build(scene.common)
    for layer in range(3):
        q = torch.randn(scene.q.shape, generator=ctx.generator)
        keys = scene.kv_cache.float().cpu()
        noise = torch.randn(keys.shape, generator=ctx.generator)
        cache = torch.where(keys.isnan(), keys, noise)
        layered = replace(
            scene,
            q=q.to(scene.q.dtype).to(ctx.torch_device),
            kv_cache=cache.to(scene.kv_cache.dtype).to(ctx.torch_device),
        )
        check(layered, decode(layered, metadata=metadata), label=f"layer {layer} ")
