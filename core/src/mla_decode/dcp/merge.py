"""Merging the ranks' partial attention by their log-sum-exp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    With L = log sum_r exp(lse_r), out = sum_r exp(lse_r - L) out_r. A rank without a
    key of a row gives (0, -inf) and has no weight.

    Args:
        outs: [ranks, T, H, 512], any float dtype.
        lses: float32 [ranks, T, H], natural logarithm.

    Returns:
        out float32 [T, H, 512] and lse float32 [T, H]; (0, -inf) for rows without any
        key anywhere.
    """
    peak = lses.amax(dim=0)
    base = torch.where(torch.isinf(peak), 0.0, peak)
    weights = torch.exp(lses - base)
    total = weights.sum(dim=0)
    mixed = torch.einsum("rth,rthc->thc", weights, outs.float())
    is_empty = total == 0
    out = mixed / torch.where(is_empty, 1.0, total).unsqueeze(-1)
    return out, torch.where(is_empty, -torch.inf, base + total.log())
