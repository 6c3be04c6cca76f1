"""What all steps of one batch's shape share: made once, looked up by later builds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchShape:
    """Shapes of a call's tensors, for a number of requests and a block length.

    What is *like* a tensor is one without memory: viewing as it takes less time than
    viewing as a tuple, by a half.
    """

    num_rows: int
    """Of a request: Q*H."""
    q: tuple[int, int, int]
    """(T, H, 576)."""
    kernel_q_like: Tensor
    """[num_reqs, Q, H, 576]."""
    out: tuple[int, int, int]
    """(T, H, 512)."""
    out_like: Tensor
    """[T, H, 512]."""
    lse: tuple[int, int]
    """(T, H)."""
    lse_strides: tuple[int, int]
    """Of a contiguous one."""
    lse_like: Tensor | None
    """[T, H]; None where a view of the library's [num_reqs, H, Q] cannot be that."""

    @classmethod
    def of(cls, num_reqs: int, query_len: int, num_heads: int) -> BatchShape:
        """The shape of a batch of T = num_reqs * query_len tokens."""
        tokens = num_reqs * query_len
        return cls(
            num_rows=query_len * num_heads,
            q=(tokens, num_heads, ROW_WIDTH),
            kernel_q_like=_like(num_reqs, query_len, num_heads, ROW_WIDTH),
            out=(tokens, num_heads, LATENT_WIDTH),
            out_like=_like(tokens, num_heads, LATENT_WIDTH),
            lse=(tokens, num_heads),
            lse_strides=(num_heads, 1),
            lse_like=_like(tokens, num_heads) if query_len == 1 else None,
        )


def _like(*shape: int) -> Tensor:
    return torch.empty((), dtype=torch.uint8, device="meta").expand(shape)
