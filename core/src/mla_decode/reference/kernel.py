"""The walk over requests' keys: in float32, or through torch's fused CPU attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_decode.dtypes import FP8_DTYPES
from mla_decode.problem import LATENT_WIDTH
from mla_decode.reference.pieces import Span
from mla_decode.reference.softmax import OnlineSoftmax

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.reference.pieces import PieceReader

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the one CPU kernel that accumulates half floats in float32 and returns the LSE


def fused_dtype(q: Tensor, kv_cache: Tensor, out: Tensor) -> torch.dtype | None:
    """The dtype in which the fused kernel may take a call; None where it may not.

    It rounds weights and each piece's output to that dtype, as GPU kernels do, so that
    it serves outputs of the same dtype only. fp8 becomes either half float exactly.
    """
    dtype = out.dtype
    exact = {dtype, *FP8_DTYPES}
    is_half = dtype in {torch.bfloat16, torch.float16}
    if out.is_cpu and is_half and q.dtype in exact and kv_cache.dtype in exact:
        return dtype
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of a wave."""

    pages: Tensor
    """int32 [ceil(seq_len / S)]."""
    seq_len: int
    """Keys of the request, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of a request that see the same keys: a token's, or the whole block's."""

    rows: slice
    visible: int
    """Keys that these rows see, from the first."""


class Wave:
    """Consecutive requests of one block length, walked together.

    Pieces that a row sees whole go through the fused kernel where it may be used, large
    ones first; the rest of its keys is multiplied in float32. Which pieces these are
    depends on the row's own keys alone.

    Args:
        query: [G * Q, H, 576]: the rows of G requests.
        requests: The G requests.
        reader: Of the cache.
        scale: Multiplies q.k.
        is_causal: Token t sees the first ``seq_len - Q + t + 1`` keys.
        fused: From `fused_dtype`.
    """

    def __init__(
        self,
        query: Tensor,
        requests: list[Request],
        reader: PieceReader,
        *,
        scale: Tensor | float,
        is_causal: bool,
        fused: torch.dtype | None,
    ) -> None:
        tokens, self._heads, width = query.shape
        self._query_len = tokens // len(requests)
        self._num_rows = self._query_len * self._heads
        self._requests, self._reader = requests, reader
        self._scale, self._is_causal, self._fused = scale, is_causal, fused
        self._rows = query.reshape(-1, width).to(fused or query.dtype)
        self._state = OnlineSoftmax(tokens * self._heads, query.device)

    def walk(self) -> tuple[Tensor, Tensor]:
        """Attend; returns (out [G * Q * H, 512], lse [G * Q * H]) in float32.

        Empty rows get (0, -inf).
        """
        blocks = [self._blocks(number) for number in range(len(self._requests))]
        begin = 0
        large = self._reader.large
        left = list(range(len(blocks)))
        while self._fused is not None:
            end = begin + large
            seers = [number for number in left if blocks[number][0].visible >= end]
            for number in left:
                if number not in seers:
                    self._finish(number, blocks[number], begin, large)
            if not seers:
                return self._state.result()
            self._fuse_together(seers, begin, end)
            left, begin = seers, end
        for number in left:
            self._attend(number, blocks[number], begin)
        return self._state.result()

    def _blocks(self, number: int) -> list[Block]:
        """One block a request, or one a token under the causal mask; fewest keys first."""
        seq_len, first = self._requests[number].seq_len, number * self._num_rows
        if not self._is_causal:
            return [Block(rows=slice(first, first + self._num_rows), visible=seq_len)]
        heads, query_len = self._heads, self._query_len
        return [
            Block(
                rows=slice(first + token * heads, first + (token + 1) * heads),
                visible=max(0, seq_len - query_len + token + 1),
            )
            for token in range(query_len)
        ]

    def _fuse_together(self, numbers: list[int], begin: int, end: int) -> None:
        """Take a piece of several requests, which all their rows see whole."""
        keys = self._gather(
            [Span(self._requests[number].pages, begin, end) for number in numbers]
        )
        parts = self._rows.view(len(self._requests), self._num_rows, -1)
        are_all = len(numbers) == len(self._requests)
        rows = parts if are_all else torch.stack([parts[number] for number in numbers])
        out, lse = self._attend_fused(rows, keys)
        if are_all:
            self._state.merge(slice(0, self._rows.shape[0]), out, lse)
            return
        for place, number in enumerate(numbers):
            first, one = number * self._num_rows, slice(place, place + 1)
            at = slice(first, first + self._num_rows)
            self._state.merge(at, out[one], lse[one])

    def _finish(self, number: int, blocks: list[Block], begin: int, size: int) -> None:
        """Walk a request's keys from ``begin`` on, in pieces of a size and smaller."""
        small = self._reader.small
        while blocks:
            end = begin + size
            seers = [block for block in blocks if block.visible >= end]
            others = blocks[: len(blocks) - len(seers)]
            if others and size > small:
                self._finish(number, others, begin, small)
            elif others:
                self._attend(number, others, begin)
            if seers:
                self._fuse(number, seers, begin, end)
            blocks, begin = seers, end

    def _fuse(self, number: int, blocks: list[Block], begin: int, end: int) -> None:
        """Take a piece of one request, which these rows see whole."""
        keys = self._gather([Span(self._requests[number].pages, begin, end)])
        at = slice(blocks[0].rows.start, blocks[-1].rows.stop)
        out, lse = self._attend_fused(self._rows[at].unsqueeze(0), keys)
        self._state.merge(at, out, lse)

    def _attend(self, number: int, blocks: list[Block], begin: int) -> None:
        """Multiply in float32 all keys from ``begin`` on, each block by itself."""
        pages, last = self._requests[number].pages, blocks[-1].visible
        exact = [self._rows[block.rows].float() * self._scale for block in blocks]
        while begin < last:
            end = min(begin + self._reader.small, last)
            keys = self._reader.gather([Span(pages, begin, end)])[0].float()
            for block, rows in zip(blocks, exact, strict=True):
                seen = min(block.visible, end) - begin
                if seen > 0:
                    self._state.attend(block.rows, rows, keys[:seen])
            begin = end

    def _gather(self, spans: list[Span]) -> Tensor:
        return self._reader.gather(spans).to(self._fused)

    def _attend_fused(self, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Attend rows [M, N, 576] over a piece each [M, K, 576], no key hidden.

        The rope part is attended as a value too, for the kernel wants one width, and
        is dropped. Returns out [M, N, 512] and lse float32 [M, N].
        """
        keys = keys.unsqueeze(1)
        scale = float(self._scale)
        out, lse = _fused(rows.unsqueeze(1), keys, keys, scale=scale)
        return out[:, 0, :, :LATENT_WIDTH], lse[:, 0]
