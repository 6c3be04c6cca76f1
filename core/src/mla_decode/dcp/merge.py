"""Merging the ranks' partial attention by their log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
"""Stands for -inf where the weights are made: exp of it is 0, and no NaN arises of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Partials:
    """Every rank's partial result, and the memory that merging them works in.

    Views are made once for a shape, because each costs the host as much as a small
    kernel.

    Attributes:
        outs: Each rank's outputs [T, H, 512].
        lses: float32 [ranks, T, H], of any strides.
        lse_of: ``lses``, rank by rank.
        finite: float32 [ranks, T, H], scratch.
        weights: float32 [ranks, T, H], scratch.
        weight_of: ``weights``, rank by rank, each [T, H, 1].
        mixed: float32 [T, H, 512], scratch; untouched for a single rank.
    """

    outs: tuple[Tensor, ...]
    lses: Tensor
    lse_of: tuple[Tensor, ...]
    finite: Tensor
    weights: Tensor
    weight_of: tuple[Tensor, ...]
    mixed: Tensor

    @classmethod
    def of(cls, outs: Tensor, lses: Tensor, scratch: Tensor, mixed: Tensor) -> Partials:
        """Views of outs [ranks, T, H, 512], of their LSE, and of scratch.

        Args:
            outs: [ranks, T, H, 512], any float dtype and strides.
            lses: float32 [ranks, T, H], any strides.
            scratch: float32 [2, ranks, T, H].
            mixed: float32 [T, H, 512].
        """
        finite, weights = scratch.unbind()
        return cls(
            outs=outs.unbind(),
            lses=lses,
            lse_of=lses.unbind(),
            finite=finite,
            weights=weights,
            weight_of=weights.unsqueeze(-1).unbind(),
            mixed=mixed,
        )

    def merge_into(self, out: Tensor) -> Tensor:
        """Write the merged outputs to `out` [T, H, 512]; give their new LSE [T, H]."""
        torch.clamp(self.lses, min=LOWEST, out=self.finite)
        torch.softmax(self.finite, 0, out=self.weights)
        targets = [self.mixed] * (len(self.outs) - 1) + [out]
        torch.mul(self.outs[0], self.weight_of[0], out=targets[0])
        for part, weight, target in zip(
            self.outs[1:], self.weight_of[1:], targets[1:], strict=True
        ):
            torch.addcmul(self.mixed, part, weight, out=target)
        first, *others = self.lse_of
        if not others:
            return first.clone()
        lse = torch.logaddexp(first, others[0])
        for other in others[1:]:
            torch.logaddexp(lse, other, out=lse)
        return lse


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
    scratch = lses.new_empty((2, *lses.shape))
    out, mixed = lses.new_empty((2, *outs.shape[1:])).unbind()
    return out, Partials.of(outs, lses, scratch, mixed).merge_into(out)
