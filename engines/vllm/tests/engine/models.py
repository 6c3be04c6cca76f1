"""Checkpoints of tiny DeepSeek models, written as vLLM reads them.

Two targets. `write_random` has random weights, wide enough that each next token hangs on
what attention saw. `write_echo` is built by hand: one attention head looks a fixed
number of tokens back and the model says that token again, so that a drafter made of the
same weights, its query turned by the missing tokens, is right about a whole block.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

LATENT, ROPE = 512, 64
HIDDEN, VOCAB = 128, 96
NOPE = VALUE = 128
MASK_TOKEN = VOCAB - 1
PERIOD = 7
THETA = 100.0
TOKEN_NORM = 3.0
SAID = 10.0
"""Gain of what the echo's attention says over the token that stands there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What differs between the tiny models."""

    layers: int
    heads: int
    nope: int = 32
    value: int = 32
    inner: int = 64

    def config(self, **more: object) -> dict[str, object]:
        """The model's config.json."""
        return {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "torch_dtype": "float32",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": self.inner,
            "moe_intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": LATENT,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": self.value,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 99,
            "num_nextn_predict_layers": 1,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": THETA,
            "rope_scaling": None,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": VOCAB + 7,
            **more,
        }

    def layer(self, name: str, draw: Draw) -> dict[str, torch.Tensor]:
        """One decoder layer with random weights."""
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        head = self.nope + ROPE
        return {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{attn}.q_proj.weight": draw(self.heads * head, HIDDEN, 4.0),
            f"{attn}.kv_a_proj_with_mqa.weight": draw(LATENT + ROPE, HIDDEN, 1.0),
            f"{attn}.kv_a_layernorm.weight": torch.ones(LATENT),
            f"{attn}.kv_b_proj.weight": draw(
                self.heads * (self.nope + self.value), LATENT, 1.0
            ),
            f"{attn}.o_proj.weight": draw(HIDDEN, self.heads * self.value, 3.0),
            f"{mlp}.gate_proj.weight": draw(self.inner, HIDDEN, 1.0),
            f"{mlp}.up_proj.weight": draw(self.inner, HIDDEN, 1.0),
            f"{mlp}.down_proj.weight": draw(HIDDEN, self.inner, 1.0),
        }


class Draw:
    """Random matrices [rows, columns], gain / sqrt(columns) wide, from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int, gain: float) -> torch.Tensor:
        """Draw one."""
        drawn = torch.randn(rows, columns, generator=self.generator)
        return drawn * (gain / columns**0.5)


def write_random(folder: Path, seed: int = 3) -> Path:
    """A target of two layers and four heads, with an MTP layer."""
    shape, draw = Shape(layers=2, heads=4), Draw(seed)
    mtp = f"model.layers.{shape.layers}"
    weights = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": draw(VOCAB, HIDDEN, 3.0),
        f"{mtp}.enorm.weight": torch.ones(HIDDEN),
        f"{mtp}.hnorm.weight": torch.ones(HIDDEN),
        f"{mtp}.eh_proj.weight": draw(HIDDEN, 2 * HIDDEN, 1.0),
        f"{mtp}.shared_head.norm.weight": torch.ones(HIDDEN),
    }
    for index in range(shape.layers + 1):
        weights |= shape.layer(f"model.layers.{index}", draw)
    weights[f"{mtp}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{mtp}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return _write(folder, shape.config(), weights)


def write_random_draft(folder: Path, *, causal: bool, seed: int = 5) -> Path:
    """A block drafter of two layers and, unlike its target, two heads."""
    shape, draw = Shape(layers=2, heads=2), Draw(seed)
    weights = {
        "model.fc.weight": draw(HIDDEN, HIDDEN, 1.0),
        "model.hidden_norm.weight": torch.ones(HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for index in range(shape.layers):
        weights |= shape.layer(f"model.layers.{index}", draw)
    return _write(folder, _draft_config(shape, causal=causal), weights)


def write_echo(folder: Path) -> Path:
    """A target of one layer that says again what stood `PERIOD` tokens before."""
    shape = Shape(layers=1, heads=1, nope=NOPE, value=VALUE)
    embedding = _echo_embedding()
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _without_constant(embedding),
        **_echo_layer(shape, PERIOD - 1),
    }
    config = shape.config(num_nextn_predict_layers=0)
    return _write(folder, config, weights)


def write_echo_draft(folder: Path) -> Path:
    """The echo's own layer; a row looks back further, since keys know their successor.

    A context key holds the target's hidden state, which is about the token after it;
    `fc` restores the constant coordinate, which what attention said has drowned.
    """
    shape = Shape(layers=1, heads=1, nope=NOPE, value=VALUE)
    restore = torch.eye(HIDDEN)
    restore[-1, -1] = SAID * LATENT**0.5 / TOKEN_NORM
    weights = {
        "model.fc.weight": restore,
        "model.hidden_norm.weight": torch.ones(HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        **_echo_layer(shape, PERIOD + 1),
    }
    return _write(folder, _draft_config(shape, causal=False), weights)


def _draft_config(shape: Shape, *, causal: bool) -> dict[str, object]:
    return shape.config(
        model_type="deepseek_v2",  # of V3, vLLM would make an MTP model
        architectures=["DFlashTinyMlaDraftModel"],
        dflash_config={
            "mask_token_id": MASK_TOKEN,
            "target_layer_ids": [0],
            "causal": causal,
        },
    )


def _echo_embedding() -> torch.Tensor:
    """Orthogonal tokens, and one coordinate that is the same for all of them."""
    tokens = torch.linalg.qr(Draw(7)(HIDDEN - 1, HIDDEN - 1, 1.0)).Q[:VOCAB]
    return torch.cat([TOKEN_NORM * tokens, torch.ones(VOCAB, 1)], dim=1)


def _without_constant(embedding: torch.Tensor) -> torch.Tensor:
    head = embedding.clone()
    head[:, -1] = 0
    return head


def _echo_layer(shape: Shape, distance: int) -> dict[str, torch.Tensor]:
    """Attention to the key `distance` tokens back, whose token is then said.

    Every key's rotary part is the same before rotation, and the query's is that one
    turned back by `distance`: their product peaks where the two rotations meet.
    """
    name = "model.layers.0"
    pairs = torch.arange(ROPE // 2)
    angles = distance * THETA ** (-2.0 * pairs / ROPE)
    q = torch.zeros(shape.nope + ROPE, HIDDEN)
    q[shape.nope :, -1] = 20 * torch.stack([angles.cos(), -angles.sin()], 1).flatten()
    kv_a = torch.zeros(LATENT + ROPE, HIDDEN)
    kv_a[: HIDDEN - 1, : HIDDEN - 1] = torch.eye(HIDDEN - 1)
    kv_a[LATENT::2, -1] = 1.0
    kv_b = torch.zeros(shape.nope + shape.value, LATENT)
    kv_b[shape.nope :, : shape.value] = torch.eye(shape.value)
    weights = shape.layer(name, Draw(0)) | {
        f"{name}.self_attn.q_proj.weight": q,
        f"{name}.self_attn.kv_a_proj_with_mqa.weight": kv_a,
        f"{name}.self_attn.kv_b_proj.weight": kv_b,
        f"{name}.self_attn.o_proj.weight": SAID * torch.eye(HIDDEN),
    }
    weights[f"{name}.mlp.down_proj.weight"].zero_()
    return weights


def _write(
    folder: Path, config: dict[str, object], weights: dict[str, torch.Tensor]
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    root = Path(sys.argv[1])
    write_random(root / "random")
    write_random_draft(root / "draft", causal=False)
    write_random_draft(root / "causal_draft", causal=True)
    write_echo(root / "echo")
    write_echo_draft(root / "echo_draft")
