"""A decoder-only MLA transformer over bytes, in the absorbed form that decodes.

A layer never forms per-head keys or values: it turns its queries into the latent space
(absorption), asks for attention over rows of 576, and brings the latent result up to
each head's value. Attention itself is not here: whoever drives the layers calls it.

Symbols: ``...`` any leading axes (tokens), D model width, H heads, C = 512 latent width,
R = 64 rope width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from mla_decode.problem import LATENT_WIDTH, ROPE_WIDTH, ROW_WIDTH

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.demo.shape import ModelShape


class Turn(NamedTuple):
    """The rotation of each token's position, computed once a step for all layers."""

    cos: Tensor
    """(..., R / 2) float32."""
    sin: Tensor


class LatentLayer(nn.Module):
    """One layer: latent attention's projections and a gated feed-forward."""

    def __init__(self, shape: ModelShape, mlp_width: int) -> None:
        super().__init__()
        self.shape = shape
        width, heads = shape.model_width, shape.num_heads
        query_width = heads * (shape.nope_width + ROPE_WIDTH)
        self.attention_norm: nn.RMSNorm = nn.RMSNorm(width, eps=1e-6)
        self.query: nn.Linear = nn.Linear(width, query_width, bias=False)
        self.latent: nn.Linear = nn.Linear(width, ROW_WIDTH, bias=False)
        self.latent_norm: nn.RMSNorm = nn.RMSNorm(LATENT_WIDTH, eps=1e-6)
        self.key_up: nn.Parameter = nn.Parameter(
            torch.empty(heads, shape.nope_width, LATENT_WIDTH)
        )
        self.value_up: nn.Parameter = nn.Parameter(
            torch.empty(heads, shape.value_width, LATENT_WIDTH)
        )
        self.output: nn.Linear = nn.Linear(heads * shape.value_width, width, bias=False)
        self.mlp_norm: nn.RMSNorm = nn.RMSNorm(width, eps=1e-6)
        self.gate: nn.Linear = nn.Linear(width, mlp_width, bias=False)
        self.up: nn.Linear = nn.Linear(width, mlp_width, bias=False)
        self.down: nn.Linear = nn.Linear(mlp_width, width, bias=False)

    def queries(self, normed: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Project queries before absorption.

        Args:
            normed: (..., D) the layer's input after `attention_norm`.
            turn: Of the tokens' positions, (..., R / 2).

        Returns:
            (..., H, nope width) and (..., H, R), the latter already rotated.
        """
        shape = self.shape
        joined = self.query(normed).unflatten(-1, (shape.num_heads, -1))
        nope, rope = torch.split(joined, [shape.nope_width, ROPE_WIDTH], dim=-1)
        cos, sin = turn
        return nope, rotate(rope, Turn(cos[..., None, :], sin[..., None, :]))

    def absorbed_queries(self, normed: Tensor, turn: Turn) -> Tensor:
        """Project queries into the latent space: (..., D) to (..., H, C + R)."""
        nope, rope = self.queries(normed, turn)
        return torch.cat(
            [torch.einsum("...hn,hnc->...hc", nope, self.key_up), rope], -1
        )

    def rows(self, normed: Tensor, turn: Turn) -> Tensor:
        """Make the cache rows of tokens: (..., D) to (..., C + R)."""
        joined = self.latent(normed)
        latent, rope = torch.split(joined, [LATENT_WIDTH, ROPE_WIDTH], dim=-1)
        gain = self.latent_norm.weight
        normed_latent = self.latent_norm(latent.to(gain.dtype))
        return torch.cat([normed_latent, rotate(rope, turn)], -1)

    def values(self, latent_out: Tensor) -> Tensor:
        """Bring attention's latent result (..., H, C) up to (..., H, value width)."""
        return torch.einsum("...hc,hvc->...hv", latent_out, self.value_up)

    def attention_delta(self, values: Tensor) -> Tensor:
        """Project (..., H, value width) to what attention adds to the state."""
        delta: Tensor = self.output(values.flatten(-2))
        return delta

    def mlp_delta(self, state: Tensor) -> Tensor:
        """Compute what the feed-forward adds to the state (..., D)."""
        normed = self.mlp_norm(state)
        gated = functional.silu(self.gate(normed)) * self.up(normed)
        delta: Tensor = self.down(gated)
        return delta


class TargetModel(nn.Module):
    """The model whose text is wanted: embedding, layers, tied head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding: nn.Embedding = nn.Embedding(shape.vocab_size, shape.model_width)
        self.layers: nn.ModuleList = nn.ModuleList(
            LatentLayer(shape, shape.mlp_width) for _ in range(shape.num_layers)
        )
        self.final_norm: nn.RMSNorm = nn.RMSNorm(shape.model_width, eps=1e-6)

    def latent_layers(self) -> tuple[LatentLayer, ...]:
        """The layers, first to last."""
        return tuple(cast("LatentLayer", layer) for layer in self.layers)

    def logits(self, state: Tensor) -> Tensor:
        """Score the next token: (..., D) to (..., vocabulary)."""
        return functional.linear(self.final_norm(state), self.embedding.weight)


def turn_of(positions: Tensor, shape: ModelShape) -> Turn:
    """Compute the rotation of positions (...), each of R / 2 angles."""
    half = ROPE_WIDTH // 2
    steps = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions[..., None].to(torch.float32) * shape.rope_base**-steps
    return Turn(angles.cos(), angles.sin())


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Turn pairs (i, i + width / 2) of the last axis; `turn` broadcasts over `x`."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    turned = torch.cat(
        [
            left * turn.cos - right * turn.sin,
            right * turn.cos + left * turn.sin,
        ],
        -1,
    )
    return turned.to(x.dtype)
