"""The one message of a step: its layout, its memory, and views of both by shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_decode.dcp.merge import Partials
from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """What a rank sends and receives for a number of tokens, as views.

    Attributes:
        rows: What to send, [parts, T, heads, 512 and the LSE's words].
        sent: The same memory, flat.
        received: The ranks' messages, flat.
        partials: The ranks' outputs and LSE within ``received``.
    """

    rows: Tensor
    sent: Tensor
    received: Tensor
    partials: Partials

    def pack(self, out: Tensor, lse: Tensor) -> None:
        """Write ``out`` [T, H, 512] and ``lse`` [T, H] into the message: one kernel."""
        words = self._by_owner(lse.unsqueeze(-1)).view(self.rows.dtype)
        torch.cat((self._by_owner(out), words), dim=-1, out=self.rows)

    def _by_owner(self, rows: Tensor) -> Tensor:
        """[T, H, W] as [parts, T, H / parts, W]: the heads that each rank will own."""
        parts, tokens, heads, _ = self.rows.shape
        token, head, column = rows.stride()
        return rows.as_strided(
            (parts, tokens, heads, rows.shape[-1]), (heads * head, token, head, column)
        )


class MessageBuffers:
    """Memory of one message, of fixed addresses.

    A row is 512 outputs and the row's LSE, whose four bytes ride as elements of the
    output's dtype. What was sent serves again as scratch once it has arrived.

    Args:
        rows: Most tokens of a step.
        heads: H.
        world: Ranks of the group.
        parts: Into how many parts, one a rank, the heads are dealt; 1: none.
        dtype: Of the outputs.
        device: Where all of it lies.
    """

    def __init__(
        self,
        *,
        rows: int,
        heads: int,
        world: int,
        parts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._world, self._parts, self._heads = world, parts, heads // parts
        self._width = LATENT_WIDTH + 4 // dtype.itemsize
        merged = rows * self._heads
        message = parts * merged * self._width
        words = max(-(-message * dtype.itemsize // 4), merged * LATENT_WIDTH)
        self._mixed = torch.empty(words, dtype=torch.float32, device=device)
        self._sent = self._mixed.view(dtype)
        self._received = torch.empty(
            world * merged * self._width, dtype=dtype, device=device
        )
        self._scratch = torch.empty(
            2 * world * merged, dtype=torch.float32, device=device
        )

    def message(self, tokens: int) -> Message:
        """Views for a step of so many tokens."""
        width, merged = self._width, tokens * self._heads
        shape = (tokens, self._heads)
        sent = self._sent[: self._parts * merged * width]
        received = self._received[: self._world * merged * width]
        partials = received.view(self._world, *shape, width)
        return Message(
            rows=sent.view(self._parts, *shape, width),
            sent=sent,
            received=received,
            partials=Partials.of(
                partials[..., :LATENT_WIDTH],
                partials[..., LATENT_WIDTH:].view(torch.float32).squeeze(-1),
                self._scratch[: 2 * self._world * merged].view(2, self._world, *shape),
                self._mixed[: merged * LATENT_WIDTH].view(*shape, LATENT_WIDTH),
            ),
        )
