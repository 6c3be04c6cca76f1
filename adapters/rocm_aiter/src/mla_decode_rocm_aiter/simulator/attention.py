"""The arithmetic of one work item: rows of a block over a range of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode_rocm_aiter.simulator.faults import SimulatedMemoryFault

if TYPE_CHECKING:
    from torch import Tensor

LATENT = 512


def gather_keys(cache: Tensor, pages: Tensor, first: int, last: int) -> Tensor:
    """Tokens of the pages `pages[first:last]`, in order, as float32.

    Args:
        cache: [pages, page_size, 1, 576].
        pages: int32 list of physical pages of all requests.
        first: First entry that is read.
        last: One past the last.
    """
    if not 0 <= first <= last <= pages.shape[0]:
        raise SimulatedMemoryFault(
            f"the kernel reads entries {first}..{last} of an index list of "
            f"{pages.shape[0]}"
        )
    used = pages[first:last].long()
    if used.numel():
        low, high = int(used.min()), int(used.max())
        if low < 0 or high >= cache.shape[0]:
            raise SimulatedMemoryFault(
                f"the kernel reads page {low if low < 0 else high} of a cache of "
                f"{cache.shape[0]} pages"
            )
    rows = cache.reshape(cache.shape[0], -1, cache.shape[-1])[used]
    return rows.reshape(-1, cache.shape[-1]).float()


def attend(
    query: Tensor,
    keys: Tensor,
    visible: Tensor,
    scale: float,
    rounding: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Rows over keys with a limit per row.

    Args:
        query: [rows, heads, 576] float32.
        keys: [tokens, 576] float32.
        visible: int64 [rows], how many leading keys each row sees.
        scale: Multiplies the scores.
        rounding: Dtype that the weights are rounded to, or None.

    Returns:
        (out [rows, heads, 512], lse [rows, heads]); a row without keys has 0 and -inf.
    """
    rows, heads, _ = query.shape
    limit = min(int(visible.max()) if rows else 0, keys.shape[0])
    if limit <= 0:
        return (
            query.new_zeros(rows, heads, LATENT),
            query.new_full((rows, heads), -torch.inf),
        )
    keys = keys[:limit]
    scores = torch.matmul(query, keys.t()) * scale
    hidden = torch.arange(limit)[None, :] >= visible[:, None]
    scores = scores.masked_fill(hidden[:, None, :], -torch.inf)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(peak.isinf(), 0.0, peak))
    total = weights.sum(dim=-1, keepdim=True)
    if rounding is not None:
        weights = weights.to(rounding).float()
    out = torch.matmul(weights, keys[:, :LATENT])
    out = torch.where(total > 0, out / total, 0.0)
    lse = torch.where(total > 0, peak + total.log(), -torch.inf)
    return out, lse.squeeze(-1)
