"""A softmax-weighted sum that takes its keys a piece at a time, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from torch import Tensor


class OnlineSoftmax:
    """Rows on their walk over their requests' keys.

    Every row meets the same pieces in the same order whatever stands beside it, so
    that its result has the same bits alone and in a block.

    Args:
        num_rows: N: query tokens times heads, of one or more requests.
        device: Where they are.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        shape = (num_rows, 1)
        dtype = torch.float32
        self._peak = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        self._total = torch.zeros(shape, dtype=dtype, device=device)
        self._sum = torch.zeros((num_rows, LATENT_WIDTH), dtype=dtype, device=device)

    def attend(self, rows: slice, query: Tensor, keys: Tensor) -> None:
        """Let some rows see a piece of keys.

        Args:
            rows: Which of the N.
            query: float32 [rows, 576], already multiplied by every scale.
            keys: float32 [K, 576], every one a key that these rows see.
        """
        scores = query @ keys.t()
        peak, decay = self._raise_peak(rows, scores.amax(dim=1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        self._total[rows].mul_(decay).add_(weights.sum(dim=1, keepdim=True))
        self._sum[rows].mul_(decay).addmm_(weights, keys[:, :LATENT_WIDTH])

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take pieces that some rows have attended elsewhere, one a request.

        Args:
            rows: Which of the N: M requests of n rows.
            out: [M, n, 512]: their output over the piece.
            lse: float32 [M, n]: their log-sum-exp over it, finite.
        """
        lse = lse.reshape(-1, 1)
        peak, decay = self._raise_peak(rows, lse)
        weight = (lse - peak).exp_()
        self._total[rows].mul_(decay).add_(weight)
        summed = self._sum[rows].mul_(decay).view(out.shape)
        summed.addcmul_(out, weight.view(*out.shape[:2], 1))

    def result(self) -> tuple[Tensor, Tensor]:
        """Output [N, 512] and log-sum-exp [N]; (0, -inf) for rows without a key."""
        out = self._sum.div_(self._total)
        is_empty = self._total == 0
        out.masked_fill_(is_empty, 0.0)
        lse = torch.where(is_empty, -torch.inf, self._peak + self._total.log())
        return out, lse.squeeze(-1)

    def _raise_peak(self, rows: slice, peak: Tensor) -> tuple[Tensor, Tensor]:
        """The new peak, and the factor that it puts on what was summed before."""
        old = self._peak[rows]
        new = torch.maximum(old, peak)
        decay = (old - new).exp_()
        old.copy_(new)
        return new, decay
