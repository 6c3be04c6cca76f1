"""READS: strides and addresses that a kernel must take as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode_contract.call import check, decode
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode_contract.context import CaseContext
    from mla_decode_contract.scene import Scene

PAST_32_BITS = 1 << 31
"""Elements before the pages in use: what a signed 32-bit index cannot count."""


@implements("reads.page_past_2_31")
def page_past_2_31(ctx: CaseContext) -> None:
    """Only the last pages of a huge cache are touched: a CPU commits no more."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    pages, size = scene.kv_cache.shape[:2]
    first = -(-PAST_32_BITS // problem.page_stride)
    storage = torch.empty(
        (first + pages, problem.page_stride),
        dtype=scene.kv_cache.dtype,
        device=ctx.torch_device,
    )
    cache = storage[:, : size * ROW_WIDTH].view(first + pages, size, ROW_WIDTH)
    cache[first:] = scene.kv_cache
    table = scene.common.block_table_tensor
    moved = scene.with_common(
        block_table_tensor=torch.where(table >= 0, table + first, table)
    )
    ctx.notes.append(f"pages from {first} on, {first * problem.page_stride} elements")
    far = replace(scene, kv_cache=cache, common=moved)
    check(far, decode(far), truth=scene.truth())


@implements("reads.table_strides")
def table_strides(ctx: CaseContext) -> None:
    """Rows back to back, and rows that are a window of a much wider table."""
    scene = draw_scene(ctx, ctx.problem(), [20, 70, 45])
    table = scene.common.block_table_tensor
    rows, width = table.shape
    wide = torch.full(
        (rows + 2, 3 * width + 5), -1, dtype=torch.int32, device=table.device
    )
    wide[1:-1, width : 2 * width] = table
    for what, other in (
        ("packed ", table.contiguous()),
        ("window ", wide[1:-1, width : 2 * width]),
    ):
        strided = replace(scene, common=scene.with_common(block_table_tensor=other))
        check(strided, decode(strided), label=what)


@implements("reads.query_transposed")
def query_transposed(ctx: CaseContext) -> None:
    """A query that was computed head by head, and its first tokens only."""
    scene = draw_scene(ctx, ctx.problem(), [20, 45])
    by_head = scene.q.transpose(0, 1).contiguous().transpose(0, 1)
    _require_view(by_head, scene)
    turned = replace(scene, q=by_head)
    check(turned, decode(turned), label="by head ")
    longer = torch.cat([by_head, by_head.flip(0)])
    first = longer.transpose(0, 1).contiguous().transpose(0, 1)[: scene.num_rows]
    _require_view(first, scene)
    part = replace(scene, q=first)
    check(part, decode(part), label="first tokens ")


@implements("reads.query_pair_views")
def query_pair_views(ctx: CaseContext) -> None:
    """Both parts as views of one projection, rope first and apart."""
    scene = draw_scene(ctx, ctx.problem(), [20, 45], num_pads=1)
    nope, rope = scene.q[..., :LATENT_WIDTH], scene.q[..., LATENT_WIDTH:]
    gap = torch.zeros_like(rope)
    joined = torch.cat([rope, gap, nope], dim=-1)
    pair = (joined[..., -LATENT_WIDTH:], joined[..., : ROW_WIDTH - LATENT_WIDTH])
    require(not pair[0].is_contiguous(), "the scene's pair is no view")
    check(scene, decode(scene, q=pair))
    check(scene, decode(scene, q=(nope, rope)), label="of the joined query ")


def _require_view(q: Tensor, scene: Scene) -> None:
    is_view = scene.q.shape[1] == 1 or not q.is_contiguous()
    require(is_view and q.stride(-1) == 1, "the scene's query is no view")
