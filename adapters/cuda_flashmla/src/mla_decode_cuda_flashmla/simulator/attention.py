"""The kernels: work lists walked as the schedule says, splits combined.

Lengths are read when the kernel runs, borders of split requests come from the schedule:
where the two disagree the result is wrong and nothing says so, as on the card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_decode.problem import LATENT_WIDTH
from mla_decode_cuda_flashmla.limits import PAGE_SIZE, TILE_ROWS
from mla_decode_cuda_flashmla.simulator.faults import IllegalAccess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """What sets one kernel's arithmetic apart."""

    name: str
    hidden_score: float
    """What a hidden key's score becomes, before the scale."""
    least_peak: float
    """Where the running maximum starts, after the scale."""
    serves_empty_rows: bool


SM90 = KernelModel(
    name="sm90", hidden_score=-1e33, least_peak=-1e30, serves_empty_rows=True
)
"""The 2026 form's kernel."""
FIRST = KernelModel(
    name="first",
    hidden_score=-math.inf,
    least_peak=-math.inf,
    serves_empty_rows=False,
)
"""The first release's kernel, and the fp8 extension that grew from it."""
MODELS = {model.name: model for model in (SM90, FIRST)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Pages of one request that one work list walks."""

    request: int
    begin: int
    end: int
    split: int | None
    """The accumulator that takes the result; None: written to the output directly."""


def segments(
    tiles: Tensor, splits: Tensor, lens: list[int], model: KernelModel
) -> Iterator[Segment]:
    """Every segment of a schedule, under the lengths that hold now."""
    before = splits.tolist()
    for entry in tiles.tolist():
        if model is SM90:
            first, last, begin, end, first_split, head, tail, _ = entry
        else:
            first, begin, last, end, first_split, *_ = entry
            begin, end, head, tail = begin // PAGE_SIZE, -(-end // PAGE_SIZE), 0, 0
        for request in range(first, min(last + 1, len(lens))):
            pages = -(-lens[request] // PAGE_SIZE)
            start = begin if request == first else 0
            stop = end if request == last else pages
            if model is SM90:
                marks = head if request == first else tail
                split = bool(marks) and request in {first, last}
            else:
                split = start != 0 or stop != pages
            number = first_split if request == first else 0
            yield Segment(
                request=request,
                begin=start,
                end=stop,
                split=before[request] + number if split else None,
            )


def attend(
    q: Tensor,
    cache: Tensor,
    lens: list[int],
    table: Tensor,
    tiles: Tensor,
    splits: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    model: KernelModel,
    value_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Run a schedule.

    Args:
        q: [B, Q, H, 576] of the cache's dtype.
        cache: [P, 64, 1, 576].
        lens: Lengths that the kernel reads.
        table: int32 [B, width].
        tiles: The work lists.
        splits: Splits before each request.
        softmax_scale: Multiplies q.k, quantisation scales included.
        causal: Tail-aligned mask.
        model: Which kernel.
        value_scale: Dequantises the values.

    Returns:
        out [B, Q, H, 512] float32, and lse float32 [B, H, Q]. Where nothing writes, NaN.
    """
    batch, query_len, heads, width = q.shape
    rows = query_len * heads
    flat = q.reshape(batch, rows, width)
    out = flat.new_full((batch, rows, LATENT_WIDTH), math.nan, dtype=torch.float32)
    lse = out.new_full((batch, rows), math.nan)
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for segment in segments(tiles, splits, lens, model):
        length = lens[segment.request]
        if not model.serves_empty_rows and length == 0:
            raise IllegalAccess(
                "CUDA error (simulated): an illegal memory access was encountered: the "
                "page before an empty request's first one was looked up"
            )
        answers = [
            _attend_tile(
                flat[segment.request, first : first + TILE_ROWS],
                cache,
                table[segment.request],
                segment,
                length,
                softmax_scale * _LOG2_E,
                _hidden_tail(first, rows, query_len, heads) if causal else None,
                model,
            )
            for first in range(0, rows, TILE_ROWS)
        ]
        value = torch.cat([answer[0] for answer in answers])
        log2_sum = torch.cat([answer[1] for answer in answers])
        if segment.split is None:
            out[segment.request] = value
            found = torch.where(log2_sum == -math.inf, math.inf, log2_sum)
            lse[segment.request] = found / _LOG2_E
        else:
            parts[segment.split] = value, log2_sum
    _combine(out, lse, splits.tolist(), parts)
    shape = (batch, query_len, heads)
    lse = lse.view(shape).transpose(1, 2)  # in memory, heads last: as the library's
    return (out * value_scale).view(*shape, LATENT_WIDTH), lse


def _hidden_tail(first: int, rows: int, query_len: int, heads: int) -> Tensor:
    """Keys at the end of the sequence that each row of a tile does not see."""
    row = torch.arange(first, min(first + TILE_ROWS, rows))
    return query_len - 1 - row // heads


def _attend_tile(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    segment: Segment,
    length: int,
    scale: float,
    hidden_tail: Tensor | None,
    model: KernelModel,
) -> tuple[Tensor, Tensor]:
    """One tile over one segment: (out float32, log2 of the sum), 0 and -inf if empty."""
    end = segment.end
    if hidden_tail is not None and model is SM90:
        is_full = q.shape[0] == TILE_ROWS
        common = int(hidden_tail[-1]) if is_full else 0
        end = min(end, -(-(length - common) // PAGE_SIZE))
    if segment.begin >= end:
        empty = q.new_zeros((q.shape[0], LATENT_WIDTH), dtype=torch.float32)
        return empty, empty.new_full((q.shape[0],), -math.inf)
    keys = _load_pages(cache, table[segment.begin : end])
    scores = q.float() @ keys.t()
    first_token = segment.begin * PAGE_SIZE
    tokens = torch.arange(first_token, end * PAGE_SIZE, device=q.device)
    seen = torch.full((q.shape[0],), length, device=q.device)
    if hidden_tail is not None:
        seen = (length - hidden_tail.to(q.device)).clamp(max=end * PAGE_SIZE)
    # the card compares positions in the last two pages only
    is_checked = tokens >= (end - 2) * PAGE_SIZE
    hidden = is_checked[None, :] & (tokens[None, :] >= seen[:, None])
    scores = scores.masked_fill(hidden, model.hidden_score) * scale
    peak = scores.amax(dim=1, keepdim=True).clamp(min=model.least_peak)
    peak = torch.where(peak == -math.inf, 0.0, peak)
    weights = torch.exp2(scores - peak)
    total = weights.sum(dim=1)
    values = keys[:, :LATENT_WIDTH]
    last_page = tokens >= (end - 1) * PAGE_SIZE
    values = values.masked_fill((last_page & (tokens >= length))[:, None], 0.0)
    value = weights.to(q.dtype).float() @ values
    is_void = (total == 0) | total.isnan()
    value = value / torch.where(is_void, 1.0, total)[:, None]
    log2_sum = torch.where(is_void, -math.inf, total.log2() + peak[:, 0])
    return value, log2_sum


def _load_pages(cache: Tensor, pages: Tensor) -> Tensor:
    """Rows of pages as float32; a page that does not exist reads as zeros."""
    index = pages.long()
    exists = (index >= 0) & (index < cache.shape[0])
    rows = cache[torch.where(exists, index, 0)].squeeze(2).float()
    rows = rows.masked_fill(~exists[:, None, None], 0.0)
    return rows.reshape(-1, rows.shape[-1])


def _combine(
    out: Tensor,
    lse: Tensor,
    before: list[int],
    parts: dict[int, tuple[Tensor, Tensor]],
) -> None:
    """Merge the splits of each request that has more than one."""
    for request in range(out.shape[0]):
        numbers = range(before[request], before[request + 1])
        if len(numbers) < 2:
            continue
        void = (out.new_full(out.shape[1:], math.nan), lse.new_full(lse.shape[1:], 0.0))
        found = [parts.get(number, void) for number in numbers]
        sums = torch.stack([part[1] for part in found])
        peak = sums.amax(dim=0)
        peak = torch.where(peak == -math.inf, 0.0, peak)
        total = torch.exp2(sums - peak).sum(dim=0)
        whole = torch.where(total == 0, math.inf, total.log2() + peak)
        weights = torch.exp2(sums - whole)
        values = torch.stack([part[0] for part in found])
        out[request] = (weights[..., None] * values).sum(dim=0)
        lse[request] = whole / _LOG2_E
