"""A block drafter: K tokens in one pass that no mask orders.

The drafter has latent caches of its own. For each token that the target has accepted,
their rows come from the target's states, at no attention call. A draft block is the last
accepted token and K slots; its rows see the whole request and each other, later slots
included, and slot i proposes the i-th token to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional

from mla_decode.demo.model import LatentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.demo.shape import ModelShape


class BlockDrafter(nn.Module):
    """Layers over a draft block, and the map from the target's states to their rows."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.model_width
        self.fuse: nn.Linear = nn.Linear(shape.num_layers * width, width, bias=False)
        self.slots: nn.Parameter = nn.Parameter(torch.empty(shape.block_len, width))
        self.layers: nn.ModuleList = nn.ModuleList(
            LatentLayer(shape, shape.drafter_mlp_width)
            for _ in range(shape.num_drafter_layers)
        )
        self.final_norm: nn.RMSNorm = nn.RMSNorm(width, eps=1e-6)

    def latent_layers(self) -> tuple[LatentLayer, ...]:
        """The layers, first to last."""
        return tuple(cast("LatentLayer", layer) for layer in self.layers)

    def context(self, states: Tensor) -> Tensor:
        """Fuse the target's states after each layer: (..., layers, D) to (..., D)."""
        fused: Tensor = self.fuse(states.flatten(-2))
        return fused.to(states.dtype)

    def block(self, anchors: Tensor) -> Tensor:
        """Lay out draft blocks.

        Args:
            anchors: (..., D) embedding of the last accepted token of each request.

        Returns:
            (..., 1 + K, D): the anchor's row, then the slots.
        """
        slots = self.slots.expand(*anchors.shape[:-1], -1, -1)
        anchor = slots[..., :1, :] + anchors[..., None, :]
        return torch.cat([anchor, slots[..., 1:, :]], -2)

    def logits(self, state: Tensor, embedding: Tensor) -> Tensor:
        """Score tokens with the target's own embedding (vocabulary, D)."""
        return functional.linear(self.final_norm(state), embedding)
