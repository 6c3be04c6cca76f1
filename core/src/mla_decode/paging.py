"""A small paged latent cache: enough for an engine's tests, examples and the demo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.dtypes import FP8_DTYPES
from mla_decode.errors import ArgumentError, BatchError
from mla_decode.metadata import CommonAttentionMetadata
from mla_decode.problem import ROW_WIDTH

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor


class PagedLatentCache:
    """Pages of latents for several layers, their free list, and requests' tables.

    All layers share one table: page p of every layer belongs to the same request.

    Args:
        num_pages: Pages of each layer.
        page_size: Tokens a page.
        num_layers: Layers that share the table.
        dtype: Of the latents.
        device: Where they live.

    Attributes:
        layers: One [num_pages, page_size, 576] tensor a layer.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size = page_size
        self.layers: tuple[Tensor, ...] = tuple(
            torch.zeros((num_pages, page_size, ROW_WIDTH), dtype=dtype, device=device)
            for _ in range(num_layers)
        )
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: dict[Hashable, list[int]] = {}
        self._lens: dict[Hashable, int] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    def seq_len(self, request: Hashable) -> int:
        """Tokens that the request holds."""
        return self._lens[self._known(request)]

    def allocate(self, request: Hashable) -> None:
        """Open an empty request.

        Raises:
            BatchError: The request is open already.
        """
        if request in self._lens:
            raise BatchError(
                "The request is open already.",
                got=repr(request),
                allowed="a name that no open request has",
                fix="free the request first, or choose another name",
            )
        self._pages[request], self._lens[request] = [], 0

    def extend(self, request: Hashable, num_tokens: int) -> Tensor:
        """Make room for tokens at a request's end, taking pages as needed.

        Returns:
            int64 [num_tokens]: the slots of the new tokens, page * page_size + row.

        Raises:
            BatchError: Too few free pages, or a negative number of tokens; nothing
                was taken.
        """
        pages = self._pages[self._known(request)]
        if num_tokens < 0:
            raise BatchError(
                "A request cannot be extended by less than no token.",
                got=repr(num_tokens),
                allowed="0 or more",
                fix="use truncate to forget tokens",
            )
        start = self._lens[request]
        needed = -(-(start + num_tokens) // self.page_size) - len(pages)
        if needed > len(self._free):
            raise BatchError(
                "The cache has too few free pages.",
                got=f"{needed} pages for {num_tokens} tokens of {request!r}",
                allowed=f"{len(self._free)} free pages",
                fix="free finished requests, or make the cache larger",
            )
        pages.extend(self._free.pop() for _ in range(needed))
        self._lens[request] = start + num_tokens
        tokens = torch.arange(start, start + num_tokens)
        table = torch.tensor(pages, dtype=torch.int64)
        slots = table[tokens // self.page_size] * self.page_size
        slots += tokens % self.page_size
        return slots.to(self.layers[0].device)

    def write(self, layer: int, slots: Tensor, latents: Tensor) -> None:
        """Write latents [tokens, 576] of one layer at slots from `extend`.

        An fp8 layer saturates at its largest number, where torch's cast makes NaN.
        """
        if latents.shape != (slots.shape[0], ROW_WIDTH):
            raise ArgumentError(
                "The latents do not fit the slots.",
                got=f"{list(latents.shape)} for {slots.shape[0]} slots",
                allowed=f"[{slots.shape[0]}, {ROW_WIDTH}]",
                fix="write one row a slot: latent 512, then rope 64",
            )
        rows = self.layers[layer].view(-1, ROW_WIDTH)
        if rows.dtype in FP8_DTYPES:
            largest = torch.finfo(rows.dtype).max
            latents = latents.clamp(-largest, largest)
        rows[slots] = latents.to(rows.dtype)

    def append(self, request: Hashable, latents: Sequence[Tensor]) -> Tensor:
        """Extend a request and write its latents, one [tokens, 576] a layer."""
        slots = self.extend(request, latents[0].shape[0])
        for layer, rows in enumerate(latents):
            self.write(layer, slots, rows)
        return slots

    def truncate(self, request: Hashable, seq_len: int) -> None:
        """Forget tokens past seq_len, such as rejected drafts; give pages back."""
        pages = self._pages[self._known(request)]
        if not 0 <= seq_len <= self._lens[request]:
            raise BatchError(
                "A request can only be cut within its tokens.",
                got=repr(seq_len),
                allowed=f"0..{self._lens[request]}",
                fix="extend the request instead to make it longer",
            )
        keep = -(-seq_len // self.page_size)
        self._free.extend(reversed(pages[keep:]))
        del pages[keep:]
        self._lens[request] = seq_len

    def free(self, request: Hashable) -> None:
        """Close a request and give its pages back."""
        self.truncate(request, 0)
        del self._pages[request], self._lens[request]

    def batch(
        self,
        requests: Sequence[Hashable],
        query_lens: Sequence[int],
        *,
        causal: bool = True,
    ) -> CommonAttentionMetadata:
        """The step's batch: each request's block is its last tokens, already written.

        Args:
            requests: Open requests, in the order of the query rows.
            query_lens: Tokens of each request's block.
            causal: The step's mask.

        Raises:
            BatchError: No request, or not one block of its own tokens for each.
        """
        device = self.layers[0].device
        lens = [self.seq_len(request) for request in requests]
        is_fitting = len(lens) == len(query_lens) and all(
            0 < block <= seq_len
            for block, seq_len in zip(query_lens, lens, strict=False)
        )
        if not lens or not is_fitting:
            raise BatchError(
                "A batch needs a block of each request's own tokens.",
                got=f"blocks {list(query_lens)} of requests of {lens} tokens",
                allowed="one block a request, of 1 token to all of its tokens",
                fix="write the step's tokens first, then name how many they are",
            )
        tables = [self._pages[request] for request in requests]
        width = max(map(len, tables))
        rows = [[*table, *[-1] * (width - len(table))] for table in tables]
        starts = torch.zeros(len(requests) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            num_reqs=len(requests),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(query_lens),
            max_seq_len=max(lens),
            block_table_tensor=torch.tensor(rows, dtype=torch.int32, device=device),
            causal=causal,
        )

    def _known(self, request: Hashable) -> Hashable:
        if request not in self._lens:
            raise BatchError(
                "No request of this name is open.",
                got=repr(request),
                allowed=", ".join(map(repr, self._lens)) or "none is open",
                fix="allocate the request first",
            )
        return request
