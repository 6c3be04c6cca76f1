"""The persistent kernel and the reduction: they execute a schedule, work by work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_decode_rocm_aiter.simulator.attention import attend, gather_keys

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode_rocm_aiter.simulator.faults import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """What a decode kernel is handed."""

    q: Tensor
    """[rows, heads, 576], folded."""
    cache: Tensor
    """[pages, page_size, 1, 576]."""
    query_starts: Tensor
    """int32 [requests + 1], not folded."""
    page_starts: Tensor
    """int32 [requests + 1]."""
    pages: Tensor
    """int32: the physical pages of all requests."""
    last_page_lens: Tensor
    """int32 [requests]."""
    page_size: int
    ratio: int
    """Folded requests per request."""
    block: int
    """Query tokens of a folded request."""
    into_query: int
    """Groups of heads that became query tokens; tokens of one group share a mask."""
    scale: float
    """Of the scores, every scale multiplied."""
    out_scale: float
    masks: bool
    """Whether this kernel masks by itself."""
    tile: int
    """Heads times tokens that the kernel computes of a work item; the rest of a larger
    one is left as it was."""
    faults: Faults
    rounding: torch.dtype | None
    """Dtype that the weights are rounded to."""


def run_works(
    call: KernelCall,
    works: list[list[int]],
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Execute each work item: a partial, or the output itself where nothing is split.

    Args:
        call: The kernel's arguments.
        works: Eight numbers each, as `get_mla_metadata_v1` lays them out.
        partial: float32 [partials, 1, heads, 512], normalised per split.
        partial_lse: float32 [partials, 1, heads, 1].
        out: [rows, heads, 512], folded as q is.
        lse: float32 [rows, heads], or None.
    """
    lens = call.last_page_lens.tolist()
    starts = call.query_starts.tolist()
    rows_per_work = call.tile // call.q.shape[1]
    for batch, at, first_row, end_row, first, last, after, _ in works:
        last_row = min(end_row, first_row + rows_per_work)
        visible, keys = _keys_of(
            call, lens, starts, batch, first_row, last_row, first, last, after
        )
        found, found_lse = attend(
            call.q[first_row:last_row].float(),
            keys,
            visible,
            call.scale,
            call.rounding,
        )
        found = found * call.out_scale
        if at < 0:
            empty = found_lse.isneginf()
            if call.faults.empty_row_nan:
                found = found.masked_fill(empty[..., None], torch.nan)
                found_lse = found_lse.masked_fill(empty, torch.inf)
            out[first_row:last_row] = found.to(out.dtype)
            if lse is not None:
                lse[first_row:last_row] = found_lse
        else:
            rows = slice(at, at + last_row - first_row)
            partial[rows, 0] = found
            partial_lse[rows, 0, :, 0] = found_lse


def _keys_of(
    call: KernelCall,
    lens: list[int],
    starts: list[int],
    batch: int,
    first_row: int,
    last_row: int,
    first: int,
    last: int,
    after: int,
) -> tuple[Tensor, Tensor]:
    """Keys of a work item and how many of them each of its rows sees."""
    size = call.page_size
    if size == 1 or after:
        stop, end = last * size, last * size + after
    else:
        # The kernel finds the length of the last page by the folded request's number.
        length = lens[batch] if batch < len(lens) else size
        stop = end = (last - 1) * size + length
    stop = max(stop, first * size)
    keys = gather_keys(call.cache, call.pages, first, max(first, last))
    if call.ratio > 1:
        row0, block = batch * call.block, call.block
    else:
        row0, block = starts[batch], starts[batch + 1] - starts[batch]
    tokens = torch.arange(first_row, last_row) - row0
    limit = torch.full_like(tokens, stop)
    if call.masks:
        tokens, block = tokens // call.into_query, block // call.into_query
        limit = torch.minimum(limit, end - (block - 1) + tokens)
    return (limit - first * size).clamp(min=0), keys


def reduce_partials(
    partial: Tensor,
    partial_lse: Tensor,
    reduce_indptr: Tensor,
    final_map: Tensor,
    partial_map: Tensor,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Combine the partials of each split tile by their log-sum-exp.

    A tile without partials is left alone. A row without a key gets 0 and, as AITER has
    it, +inf.
    """
    starts = reduce_indptr.tolist()
    firsts = partial_map.tolist()
    for tile in range(len(starts) - 1):
        pieces = firsts[starts[tile] : starts[tile + 1]]
        if not pieces:
            continue
        row0, row1 = final_map[tile].tolist()
        rows = [slice(first, first + row1 - row0) for first in pieces]
        each_lse = torch.stack([partial_lse[at, 0, :, 0] for at in rows])
        each = torch.stack([partial[at, 0] for at in rows])
        total = torch.logsumexp(each_lse, dim=0)
        weights = torch.exp(each_lse - torch.where(total.isinf(), 0.0, total))
        weighed = torch.where(weights[..., None] > 0, each * weights[..., None], 0.0)
        out[row0:row1] = weighed.sum(dim=0).to(out.dtype)
        if lse is not None:
            lse[row0:row1] = total.masked_fill(total.isneginf(), torch.inf)
