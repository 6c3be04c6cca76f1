"""The shape of the demo's two models, and the arithmetic of their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from mla_decode.problem import ROPE_WIDTH


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Widths and depths of the target and of the drafter that reads its states."""

    vocab_size: int = 256
    """One token a byte."""
    model_width: int = 256
    num_heads: int = 4
    """H: query heads; they share one latent KV head."""
    nope_width: int = 32
    """Width of a head's query and key before absorption, without its rope part."""
    value_width: int = 32
    """Width of a head's value once it is brought up from the latent."""
    num_layers: int = 3
    """Layers of the target; the drafter reads the state after each of them."""
    mlp_width: int = 512
    num_drafter_layers: int = 2
    drafter_mlp_width: int = 256
    draft_len: int = 6
    """K: tokens that the drafter drafts in one pass."""
    max_model_len: int = 512
    """Positions that the models were trained on."""
    rope_base: float = 10000.0

    @property
    def block_len(self) -> int:
        """Tokens of a block: the last accepted one and the K drafted after it."""
        return self.draft_len + 1

    @property
    def softmax_scale(self) -> float:
        """Scale of q.k: from the head width before absorption, never from 576."""
        return float((self.nope_width + ROPE_WIDTH) ** -0.5)
