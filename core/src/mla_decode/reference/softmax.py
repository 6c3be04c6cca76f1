"""A softmax-weighted sum that takes its keys a piece at a time, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from torch import Tensor


class OnlineSoftmax:
    """The rows of one request on their walk over its keys.

    Every row meets the same pieces in the same order whatever stands beside it, so
    that its result has the same bits alone and in a block.

    Args:
        num_rows: N: query tokens times heads.
        like: Gives the dtype, float32 or float64, and the device.
    """

    def __init__(self, num_rows: int, like: Tensor) -> None:
        self._peak = like.new_full((num_rows, 1), -torch.inf)
        self._total = like.new_zeros((num_rows, 1))
        self._sum = like.new_zeros((num_rows, LATENT_WIDTH))

    def attend(self, rows: slice, query: Tensor, keys: Tensor) -> None:
        """Let some rows see a piece of keys.

        Args:
            rows: Which of the N.
            query: [rows, 576], already multiplied by every scale.
            keys: [K, 576], every one a key of the request that these rows see.
        """
        scores = query @ keys.t()
        peak, decay = self._raise_peak(rows, scores.amax(dim=1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        self._total[rows].mul_(decay).add_(weights.sum(dim=1, keepdim=True))
        self._sum[rows].mul_(decay).addmm_(weights, keys[:, :LATENT_WIDTH])

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take a piece that some rows have attended elsewhere.

        Args:
            rows: Which of the N.
            out: [rows, 512]: their output over the piece.
            lse: [rows]: their log-sum-exp over it, finite.
        """
        lse = lse.unsqueeze(-1)
        peak, decay = self._raise_peak(rows, lse)
        weight = (lse - peak).exp_()
        self._total[rows].mul_(decay).add_(weight)
        self._sum[rows].mul_(decay).addcmul_(out.to(self._sum.dtype), weight)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output [N, 512] and log-sum-exp [N]; (0, -inf) for rows without a key."""
        total = self._total
        is_empty = total == 0
        out = torch.where(is_empty, 0.0, self._sum / total)
        lse = torch.where(is_empty, -torch.inf, self._peak + total.log())
        return out, lse.squeeze(-1)

    def _raise_peak(self, rows: slice, peak: Tensor) -> tuple[Tensor, Tensor]:
        """The new peak, and the factor that it puts on what was summed before."""
        old = self._peak[rows]
        new = torch.maximum(old, peak)
        decay = (old - new).exp_()
        old.copy_(new)
        return new, decay
