"""A request's keys in pieces that stay in a core's cache; none is the whole request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

CHUNK_TOKENS = 512
"""Most keys of a piece: 576 KiB in bf16."""


class Pieces:
    """Pieces of one cache: gathered from small pages, or parts of large ones.

    A piece is as many whole pages as fit into `CHUNK_TOKENS`, gathered into one small
    buffer, or that many rows of a page that is larger, in place. Where pieces begin
    does not depend on a request's length, so that a row's result does not either.

    Args:
        kv_cache: [P, S, 576], pages any stride apart.
        at_once: Full pieces that `full` hands out together.
    """

    def __init__(self, kv_cache: Tensor, at_once: int = 1) -> None:
        self._cache, self._at_once = kv_cache, at_once
        self._page_size = page_size = kv_cache.shape[1]
        self._is_gathered = page_size <= CHUNK_TOKENS
        self._step = max(1, CHUNK_TOKENS // page_size)
        self._tokens = min(self._step * page_size, CHUNK_TOKENS)
        self._raw = kv_cache
        if kv_cache.element_size() == 1:  # torch indexes bytes on every device
            self._raw = kv_cache.view(torch.uint8)
        num_pages = at_once * self._step if self._is_gathered else 0
        shape = (num_pages, page_size, kv_cache.shape[2])
        self._buffer = self._raw.new_empty(shape)

    def full_end(self, limit: int) -> int:
        """Keys of the full pieces that end at or before ``limit``."""
        if self._is_gathered:
            return limit // self._tokens * self._tokens
        begin = limit // self._page_size * self._page_size
        return begin + (limit - begin) // self._tokens * self._tokens

    def full(self, pages: Tensor, end: int) -> Iterator[Tensor]:
        """Keys ``0..end``, several pieces at once: [M, tokens, 576], valid till next.

        Args:
            pages: int32 [>= ceil(end / S)]: the request's pages.
            end: What `full_end` returned.
        """
        if not self._is_gathered:
            yield from (keys.unsqueeze(0) for keys in self.rest(pages, 0, end))
            return
        group = self._at_once * self._step
        last = end // self._page_size
        for first in range(0, last, group):
            gathered = self._gather(pages[first : min(first + group, last)])
            yield gathered.view(-1, self._tokens, gathered.shape[-1])

    def rest(self, pages: Tensor, begin: int, end: int) -> Iterator[Tensor]:
        """Keys ``begin..end``, a piece at a time: [<= tokens, 576], valid till next.

        Args:
            pages: int32 [ceil(end / S)]: the request's pages.
            begin: Where a piece begins.
            end: Past the last key. Slots of its page past it are never handed out:
                they may hold NaN.
        """
        size = self._page_size
        while begin < end:
            stop = min(begin + self._tokens, end)
            first = begin // size
            if self._is_gathered:
                rows = self._gather(pages[first : -(-stop // size)])
                yield rows.view(-1, rows.shape[-1])[: stop - begin]
            else:
                stop = min(stop, (first + 1) * size)
                page = self._cache[int(pages[first])]
                yield page[begin - first * size : stop - first * size]
            begin = stop

    def _gather(self, pages: Tensor) -> Tensor:
        buffer = self._buffer[: pages.shape[0]]
        torch.index_select(self._raw, 0, pages, out=buffer)
        return buffer.view(self._cache.dtype)
