"""The engine's caches: how the kernel takes them, and which ones were checked before."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from mla_decode.errors import ArgumentError
from mla_decode_cuda_flashmla.limits import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from torch import Tensor


class CheckedCaches:
    """Caches that passed every check: each layer's, the same tensor step after step.

    Keeps no tensor of the engine alive: an entry, with the memory that its view holds,
    goes when the engine drops its tensor.
    """

    def __init__(self) -> None:
        self._checked: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def find(self, cache: Tensor) -> Tensor | None:
        """The paged view of a tensor that was checked and still lies where it did."""
        found = self._checked.get(id(cache))
        if found is not None and found[0]() is cache and found[1] == cache.data_ptr():
            return found[2]
        return None

    def add(self, cache: Tensor) -> None:
        """Remember a cache of two pages or more that was checked."""
        key = id(cache)
        if cache.shape[0] > 1:
            forget = weakref.ref(cache, lambda _: self._checked.pop(key, None))
            # A view of the tensor itself would keep it alive: of its detached twin, not.
            view = paged(cache.detach())
            self._checked[key] = forget, cache.data_ptr(), view


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
