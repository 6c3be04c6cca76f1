"""Decoding with one fault, from what every backend's metadata holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mla_decode.metadata import DecodeMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One request as a fault sees it."""

    request: int
    seq_len: int
    query_len: int
    page_size: int
    causal: bool

    def true_visible(self) -> Tensor:
        """Keys that each token should see, int64 [Q]."""
        if not self.causal:
            return torch.full((self.query_len,), self.seq_len)
        return self.seq_len - self.query_len + 1 + torch.arange(self.query_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Where a decode goes wrong; by default nowhere."""

    visible: Callable[[Block], Tensor] = Block.true_visible
    """Keys that each token sees; more than seq_len reads on into the page."""
    pages: Callable[[Tensor], Tensor] = torch.Tensor.clone
    """From the used table slots to the pages that are read."""
    weights: Callable[[Tensor], Tensor] = torch.Tensor.clone
    """From the softmax's weights to those that meet the values."""


def faulty_decode(
    fault: Fault,
    q: Tensor | tuple[Tensor, Tensor],
    kv_cache: Tensor,
    metadata: DecodeMetadata,
    *,
    softmax_scale: float,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    lens: list[int] | None = None,
    causal: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode in float64 on the CPU with a fault.

    Args:
        fault: What goes wrong.
        q: As `Backend.forward` takes it.
        kv_cache: The same.
        metadata: The step's.
        softmax_scale: Multiplies q.k.
        q_scale: Dequantises q.
        kv_scale: Dequantises the cache.
        lens: Lengths to use instead of the metadata's.
        causal: A mask to use instead of the metadata's.

    Returns:
        out [T, H, 512] and lse [T, H], float64.
    """
    query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    query = query.cpu().double() * (1.0 if q_scale is None else float(q_scale))
    starts = metadata.query_start_loc.tolist()
    lens = metadata.seq_lens.tolist() if lens is None else lens
    table, size = metadata.block_table.cpu().long(), kv_cache.shape[1]
    out = torch.zeros((*query.shape[:2], LATENT_WIDTH), dtype=torch.float64)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64)
    for request, seq_len in enumerate(lens):
        first, last = starts[request], starts[request + 1]
        if seq_len == 0 or first == last:
            continue
        block = Block(
            request=request,
            seq_len=seq_len,
            query_len=last - first,
            page_size=size,
            causal=metadata.causal if causal is None else causal,
        )
        visible = fault.visible(block)
        count = max(int(visible.max()), 0)
        used = table[request, : -(-max(count, 1) // size)]
        pages = fault.pages(used).clamp(0, kv_cache.shape[0] - 1)
        keys = kv_cache[pages.to(kv_cache.device)].cpu()
        keys = keys.double().reshape(-1, ROW_WIDTH)[:count]
        keys = keys * (1.0 if kv_scale is None else float(kv_scale))
        scores = torch.einsum("qhd,kd->qhk", query[first:last], keys) * softmax_scale
        hidden = torch.arange(count)[None, :] >= visible[:, None]
        scores = scores.masked_fill(hidden[:, None, :], -torch.inf)
        row_lse = scores.logsumexp(-1)
        weights = torch.exp(scores - row_lse[..., None])
        weights = torch.where(row_lse[..., None].isneginf(), 0.0, weights)
        weights = fault.weights(weights)
        out[first:last] = torch.einsum("qhk,kd->qhd", weights, keys[:, :LATENT_WIDTH])
        lse[first:last] = row_lse
    return out, lse


def overwrite(result: Any, out: Tensor, lse: Tensor) -> Any:
    """Put faulty values where a backend has put its own."""
    result.out.copy_(out.to(result.out.dtype))
    if result.lse is not None:
        result.lse.copy_(lse.to(result.lse.dtype))
    return result
