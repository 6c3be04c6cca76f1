"""Caches that a builder has checked: every layer's, step after step the same tensors."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from mla_decode.errors import ArgumentError
from mla_decode_cuda_flashmla.limits import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from torch import Tensor


class KnownCaches:
    """Checked caches with their kernel's view, forgotten when the engine drops them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def find(self, cache: Tensor) -> Tensor | None:
        """The [P, 64, 1, 576] view of a known cache, if it still lies where it did."""
        found = self._known.get(id(cache))
        if found is None or found[0]() is not cache or found[1] != cache.data_ptr():
            return None
        return found[2]

    def add(self, cache: Tensor) -> None:
        """Remember a cache that was checked."""
        key = id(cache)
        alias = cache.new_empty(0)  # not a view: that would keep its base alive
        view = paged(cache)
        alias.set_(
            cache.untyped_storage(), view.storage_offset(), view.shape, view.stride()
        )
        forget = weakref.ref(cache, lambda _: self._known.pop(key, None))
        self._known[key] = forget, cache.data_ptr(), alias


def paged(cache: Tensor) -> Tensor:
    """The cache with its one KV head as an axis: [P, 64, 1, 576].

    Raises:
        ArgumentError: No page, or a base address that the copy engine cannot take.
    """
    pages, page_size, width = cache.shape
    if not pages or cache.data_ptr() % ALIGNMENT_BYTES:
        raise ArgumentError(
            "FlashMLA cannot read this cache.",
            got=f"{pages} pages at address {cache.data_ptr():#x}",
            allowed=f"1 page or more, at a multiple of {ALIGNMENT_BYTES} bytes",
            fix="allocate the cache apart, or slice it at whole pages",
        )
    if pages == 1:  # its page stride means nothing, and may be one that is refused
        stride = page_size * width
        return cache.as_strided((1, page_size, 1, width), (stride, width, width, 1))
    return cache.unsqueeze(2)
