"""The float64 oracle: the contract's arithmetic written once, as plainly as it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from torch import Tensor


def decode_oracle(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Decode in float64 by gathering each request's whole KV. Slow, and the truth.

    Args:
        q: [T, H, 576] of any float dtype, fp8 included.
        kv_cache: [P, S, 576] likewise.
        block_table: int32 [N, width]; unused slots may hold anything.
        seq_lens: int32 [N].
        query_start_loc: int32 [N + 1]; rows at or past its last entry are pads.
        causal: Tail-aligned mask, or none.
        softmax_scale: Multiplies q.k.
        q_scale: Dequantises q.
        kv_scale: Dequantises the cache.

    Returns:
        out float64 [T, H, 512] and lse float64 [T, H]; (0, -inf) for empty rows.
    """
    rows, heads, _ = q.shape
    page_size = kv_cache.shape[1]
    out = torch.zeros((rows, heads, LATENT_WIDTH), dtype=torch.float64)
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64)
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        if seq_len == 0 or first == last:
            continue
        used = block_table[request, : -(-seq_len // page_size)].long()
        keys = kv_cache[used].cpu().double().reshape(-1, q.shape[-1])[:seq_len]
        keys = keys * kv_scale
        query = q[first:last].cpu().double() * q_scale
        scores = torch.einsum("qhd,kd->qhk", query, keys) * softmax_scale
        if causal:
            query_len = last - first
            visible = seq_len - query_len + torch.arange(query_len) + 1
            hidden = torch.arange(seq_len)[None, :] >= visible[:, None]
            scores = scores.masked_fill(hidden[:, None, :], -torch.inf)
        row_lse = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - row_lse[..., None])
        weights = torch.where(row_lse[..., None].isinf(), 0.0, weights)
        out[first:last] = torch.einsum("qhk,kd->qhd", weights, keys[:, :LATENT_WIDTH])
        lse[first:last] = row_lse
    return out, lse
