"""One walk over a request's keys: in float32, or through torch's fused CPU attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_decode.dtypes import FP8_DTYPES
from mla_decode.problem import LATENT_WIDTH
from mla_decode.reference.softmax import OnlineSoftmax

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.reference.pieces import Pieces

PIECES_AT_ONCE = 4
"""Pieces that the fused kernel takes in one call, so that it may use several cores."""

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
class Group:
    """Rows of a request that see the same keys: a token's, or the whole block's."""

    rows: slice
    visible: int
    """Keys that these rows see, from the first."""


def groups_of(
    query_len: int, heads: int, seq_len: int, *, is_causal: bool
) -> list[Group]:
    """The groups of a block: one, or one a token under the causal mask."""
    if not is_causal:
        return [Group(rows=slice(0, query_len * heads), visible=seq_len)]
    return [
        Group(
            rows=slice(token * heads, (token + 1) * heads),
            visible=max(0, seq_len - query_len + token + 1),
        )
        for token in range(query_len)
    ]


def walk_request(
    query: Tensor,
    pieces: Pieces,
    pages: Tensor,
    seq_len: int,
    *,
    scale: Tensor | float,
    is_causal: bool,
    fused: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Attend one request's rows over its pages.

    Full pieces that a group sees whole go through the fused kernel where it may be
    used; all else is multiplied in float32, each group by itself.

    Args:
        query: [Q, H, 576].
        pieces: Of the cache.
        pages: int32 [ceil(seq_len / S)].
        seq_len: Keys of the request, at least 1.
        scale: Multiplies q.k.
        is_causal: Token t sees the first ``seq_len - Q + t + 1`` keys.
        fused: From `fused_dtype`.

    Returns:
        (out [Q * H, 512], lse [Q * H]) in float32; (0, -inf) for empty rows.
    """
    query_len, heads, width = query.shape
    rows = query.reshape(-1, width)
    exact = rows.float() * scale
    state = OnlineSoftmax(query_len * heads, exact)
    groups = groups_of(query_len, heads, seq_len, is_causal=is_causal)
    begin = 0
    half = rows if fused is None else rows.to(fused)
    if fused is not None:
        begin = pieces.full_end(groups[0].visible)
        everyone = slice(0, query_len * heads)
        for several in pieces.full(pages, begin):
            for part in zip(*attend_fused(half, several.to(fused), scale), strict=True):
                state.merge(everyone, *part)
    for keys in pieces.rest(pages, begin, seq_len):
        end = begin + keys.shape[0]
        is_full = pieces.full_end(end) == end
        in_float = keys.float()
        for group in groups:
            seen, at = min(group.visible, end) - begin, group.rows
            if fused is not None and is_full and group.visible >= end:
                out, lse = attend_fused(half[at], keys.to(fused)[None], scale)
                state.merge(at, out[0], lse[0])
            elif seen > 0:
                state.attend(at, exact[at], in_float[:seen])
        begin = end
    return state.result()


def attend_fused(
    rows: Tensor, keys: Tensor, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Attend rows [N, 576] over each of M pieces [M, K, 576], none of a row hidden.

    The rope part is attended as a value too, for the kernel wants one width, and is
    dropped. Returns out [M, N, 512] and lse float32 [M, N].
    """
    query = rows.expand(keys.shape[0], 1, *rows.shape)
    keys = keys.unsqueeze(1)
    out, lse = _fused(query, keys, keys, scale=float(scale))
    return out[:, 0, :, :LATENT_WIDTH], lse[:, 0]
