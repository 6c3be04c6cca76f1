"""Keys out of a paged cache, a bounded piece at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

PIECE_TOKENS = 512
"""Keys of a small piece at most: 576 KiB in bf16."""
SMALL_IN_LARGE = 4
"""Small pieces in a large one, as long requests are walked."""


class Span(NamedTuple):
    """Consecutive keys of a request."""

    pages: Tensor
    """int32: the request's pages; slots past its keys are never read."""
    begin: int
    """The first key, where a small piece begins."""
    end: int
    """Past the last key."""


class PieceReader:
    """Gathers pieces from the scattered pages of one cache into one small buffer.

    A small piece is as many whole pages as fit into `PIECE_TOKENS`, or that many keys
    where pages are larger. Where pieces begin does not depend on a request's length,
    so that a row's result does not either.

    Args:
        kv_cache: [P, S, 576], pages any stride apart.
    """

    def __init__(self, kv_cache: Tensor) -> None:
        self._dtype = kv_cache.dtype
        is_fp8 = kv_cache.element_size() == 1  # torch indexes bytes on every device
        self._cache = kv_cache.view(torch.uint8) if is_fp8 else kv_cache
        self._page_size = page_size = kv_cache.shape[1]
        self._buffer = self._cache.new_empty((0, kv_cache.shape[2]))
        self.small: int = PIECE_TOKENS
        if page_size <= PIECE_TOKENS:
            self.small = PIECE_TOKENS // page_size * page_size
        self.large: int = SMALL_IN_LARGE * self.small

    def gather(self, spans: list[Span]) -> Tensor:
        """The keys of equally long spans: [spans, tokens, 576], valid till the next.

        Slots of a last page past a span may be copied but are not handed out: they
        may hold NaN.
        """
        if self._page_size <= PIECE_TOKENS:
            gathered = self._gather_pages(spans)
        else:
            gathered = self._gather_parts(spans)
        return gathered.view(self._dtype)

    def _gather_pages(self, spans: list[Span]) -> Tensor:
        size, tokens = self._page_size, spans[0].end - spans[0].begin
        parts = [pages[begin // size : -(-end // size)] for pages, begin, end in spans]
        pages = torch.cat(parts) if len(parts) > 1 else parts[0]
        buffer = self._room(pages.shape[0] * size)
        torch.index_select(
            self._cache, 0, pages, out=buffer.view(-1, size, buffer.shape[1])
        )
        return buffer.view(len(spans), -1, buffer.shape[1])[:, :tokens]

    def _gather_parts(self, spans: list[Span]) -> Tensor:
        size, tokens = self._page_size, spans[0].end - spans[0].begin
        buffer = self._room(len(spans) * tokens).view(len(spans), tokens, -1)
        for room, (pages, begin, end) in zip(buffer, spans, strict=True):
            for number in range(begin // size, -(-end // size)):
                first = max(begin, number * size)
                last = min(end, (number + 1) * size)
                page = self._cache[int(pages[number])]
                room[first - begin : last - begin].copy_(
                    page[first - number * size : last - number * size]
                )
        return buffer

    def _room(self, rows: int) -> Tensor:
        if self._buffer.shape[0] < rows:
            self._buffer = self._buffer.new_empty((rows, self._buffer.shape[1]))
        return self._buffer[:rows]
