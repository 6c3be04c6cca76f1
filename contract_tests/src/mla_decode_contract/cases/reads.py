"""READS: what must never be read, and where what is read lies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mla_decode.problem import LATENT_WIDTH
from mla_decode_contract.call import check, decode
from mla_decode_contract.cases.common import serve
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene, poison
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext
    from mla_decode_contract.scene import Scene

HUGE_SLOT = 2147480000
"""A page number whose address no cache reaches."""


@implements("reads.table_tail_negative")
def table_tail_negative(ctx: CaseContext) -> None:
    """-1 in every unused slot."""
    serve(ctx, ctx.problem(), [3, 70, 33], free_slot=-1)


@implements("reads.table_tail_huge")
def table_tail_huge(ctx: CaseContext) -> None:
    """Huge page numbers in every unused slot."""
    serve(ctx, ctx.problem(), [3, 70, 33], free_slot=HUGE_SLOT)


@implements("reads.page_tail")
def page_tail(ctx: CaseContext) -> None:
    """NaN behind the last key of each page that is not full."""
    problem = ctx.problem()
    size = problem.page_size
    serve(ctx, problem, [1, size + 1, max(1, size - 1), 2 * size + size // 2 + 1])


@implements("reads.page_tail_large")
def page_tail_large(ctx: CaseContext) -> None:
    """Finite keys behind the end that a wrong mask would show at once."""
    problem = ctx.problem()
    size = problem.page_size
    scene = draw_scene(ctx, problem, [1, size + 1, max(1, size - 1)])
    cache = scene.kv_cache
    as_float = cache.float()
    # A mean key times ten wins the softmax of about half of the rows if it is read.
    cache.copy_(torch.where(as_float.isnan(), 10.0, as_float).to(cache.dtype))
    check(scene, decode(scene))


@implements("reads.pad_queries")
def pad_queries(ctx: CaseContext) -> None:
    """NaN in the rows of pads, which the scene holds by default."""
    scene = draw_scene(ctx, ctx.problem(), [20, 45], num_pads=3)
    require(
        bool(scene.q[scene.starts[-1] :].float().isnan().all()),
        "the scene's pad queries are not poisoned",
    )
    check(scene, decode(scene))


def _page_size(size: int) -> None:
    @implements(f"reads.page_size_{size}")
    def run(ctx: CaseContext) -> None:
        serve(ctx, ctx.problem(page_size=size), [5, 130, 64])


for _size in (1, 16, 64):
    _page_size(_size)


@implements("reads.physical_pages")
def physical_pages(ctx: CaseContext) -> None:
    """A table in falling order: logical and physical pages never agree."""
    problem = ctx.problem()
    size = problem.page_size
    count = max(3, -(-200 // size))
    scene = draw_scene(
        ctx, replace(problem, max_model_len=max(512, size * count)), [size * count - 1]
    )
    table = scene.common.block_table_tensor
    falling = torch.arange(count, 0, -1, dtype=torch.int32, device=table.device)
    fresh = torch.randn(scene.kv_cache.shape, generator=ctx.generator)
    scene.kv_cache.copy_(fresh.to(scene.kv_cache.dtype))
    poison_page(scene, 0)
    poison_tail(scene, int(falling[-1]), size - 1)
    table[0, :count] = falling
    check(scene, decode(scene))


def poison_page(scene: Scene, page: int) -> None:
    """Fill one page with NaN."""
    scene.kv_cache[page] = torch.full((), torch.nan).to(scene.kv_cache.dtype)


def poison_tail(scene: Scene, page: int, first: int) -> None:
    """Fill one page from a slot on with NaN."""
    scene.kv_cache[page, first:] = torch.full((), torch.nan).to(scene.kv_cache.dtype)


@implements("reads.shared_pages")
def shared_pages(ctx: CaseContext) -> None:
    """Three requests over one prefix."""
    problem = ctx.problem()
    size = problem.page_size
    longest = 3 * size + 2
    if longest > problem.max_model_len:
        problem = replace(problem, max_model_len=longest)
    serve(ctx, problem, [2 * size, 2 * size + 1, longest], shared_pages=2)


@implements("reads.page_stride")
def page_stride(ctx: CaseContext) -> None:
    """One row of NaN between any two pages."""
    serve(ctx, ctx.problem(gap_rows=1), [20, 70])


@implements("reads.inputs_unchanged")
def inputs_unchanged(ctx: CaseContext) -> None:
    """Bytes before and after."""
    scene = draw_scene(ctx, ctx.problem(), [20, 0, 45], num_pads=1)
    common = scene.common
    watched = {
        "q": scene.q,
        "kv_cache": scene.kv_cache,
        "block_table_tensor": common.block_table_tensor,
        "seq_lens": common.seq_lens,
        "query_start_loc": common.query_start_loc,
        "query_start_loc_cpu": common.query_start_loc_cpu,
    }
    before = {name: _bytes(tensor).clone() for name, tensor in watched.items()}
    check(scene, decode(scene))
    for name, tensor in watched.items():
        require(torch.equal(before[name], _bytes(tensor)), f"{name} was changed")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@implements("reads.strided_query")
def strided_query(ctx: CaseContext) -> None:
    """A query cut from a wider projection: only the last axis is contiguous."""
    scene = draw_scene(ctx, ctx.problem(), [20, 45])
    rows, heads, width = scene.q.shape
    wide = poison(
        torch.empty(
            (rows, heads + 1, width + 64), dtype=scene.q.dtype, device=scene.q.device
        )
    )
    view = wide[:, :heads, :width]
    view.copy_(scene.q)
    strided = replace(scene, q=view)
    check(scene, decode(strided))


@implements("reads.query_pair")
def query_pair(ctx: CaseContext) -> None:
    """The latent and the rotary part apart, as engines hold them."""
    scene = draw_scene(ctx, ctx.problem(), [20, 45], num_pads=1)
    nope = scene.q[..., :LATENT_WIDTH].contiguous()
    rope = scene.q[..., LATENT_WIDTH:].contiguous()
    check(scene, decode(scene, q=(nope, rope)))
