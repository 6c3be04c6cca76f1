"""One online-softmax walk over a request's pages, in float32, a chunk at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_TOKENS = 512
"""Keys gathered at a time: the chunk stays in cache, and no whole KV is copied."""


def walk_request(
    query: Tensor,
    kv_cache: Tensor,
    pages: Tensor,
    seq_len: int,
    visible: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend one request's rows over its pages.

    Args:
        query: [Q, H, 576] in the compute dtype, already multiplied by every scale.
        kv_cache: [P, S, 576].
        pages: int64 [ceil(seq_len / S)].
        seq_len: Keys of the request, at least 1.
        visible: int64 [Q]: keys that each token sees; None where all see all.

    Returns:
        (out [Q, H, 512], lse [Q, H]) in the compute dtype; (0, -inf) for empty rows.
    """
    query_len, heads, width = query.shape
    page_size = kv_cache.shape[1]
    flat = query.reshape(-1, width)
    total = flat.new_zeros((flat.shape[0], 1))
    peak = flat.new_full((flat.shape[0], 1), -torch.inf)
    acc = flat.new_zeros((flat.shape[0], LATENT_WIDTH))
    step = max(1, CHUNK_TOKENS // page_size)
    for first in range(0, pages.shape[0], step):
        begin = first * page_size
        count = min(seq_len - begin, step * page_size)
        keys = kv_cache.index_select(0, pages[first : first + step])
        keys = keys.view(-1, width)[:count].to(query.dtype)
        scores = flat @ keys.t()
        if visible is not None:
            hidden = torch.arange(begin, begin + count, device=query.device)
            hidden = hidden[None, :] >= visible[:, None]
            scores.view(query_len, heads, count).masked_fill_(
                hidden[:, None, :], -torch.inf
            )
        new_peak = torch.maximum(peak, scores.amax(dim=1, keepdim=True))
        safe = torch.where(new_peak.isinf(), 0.0, new_peak)
        weights = torch.exp(scores - safe)
        decay = torch.exp(peak - safe)
        total = total * decay + weights.sum(dim=1, keepdim=True)
        acc = acc.mul_(decay).addmm_(weights, keys[:, :LATENT_WIDTH])
        peak = new_peak
    out = torch.where(total > 0, acc / total, 0.0)
    lse = torch.where(total > 0, peak + total.log(), -torch.inf)
    shape = (query_len, heads)
    return out.view(*shape, LATENT_WIDTH), lse.view(shape)
