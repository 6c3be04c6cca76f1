"""The same two models with dense attention over whole sequences.

Training needs gradients, and the contract decodes: here the latents are brought up to
per-head keys and values, which equals the absorbed decode in value. Tests hold the two
against each other. Nothing here is called when the demo generates.

Symbols: B sequences, L tokens of each, H heads, D model width, K drafted tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from mla_decode.demo.model import turn_of
from mla_decode.problem import LATENT_WIDTH, ROPE_WIDTH

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.demo.drafter import BlockDrafter
    from mla_decode.demo.model import LatentLayer, TargetModel, Turn


def keys_values(layer: LatentLayer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Bring cache rows (B, L, 576) up to per-head keys and values (B, H, L, width)."""
    latent, rope = torch.split(rows, [LATENT_WIDTH, ROPE_WIDTH], dim=-1)
    keys = torch.einsum("blc,hnc->bhln", latent, layer.key_up)
    values = torch.einsum("blc,hvc->bhlv", latent, layer.value_up)
    rope = rope[:, None].expand(-1, keys.shape[1], -1, -1).to(keys.dtype)
    return torch.cat([keys, rope], -1), values


def attend(
    layer: LatentLayer,
    normed: Tensor,
    turn: Turn,
    keys: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend densely; returns what attention adds to the state, (B, L, D)."""
    query = torch.cat(layer.queries(normed, turn), -1).transpose(1, 2)
    padded = functional.pad(values, (0, keys.shape[-1] - values.shape[-1]))
    found = functional.scaled_dot_product_attention(
        query.to(keys.dtype),
        keys,
        padded,
        attn_mask=mask,
        is_causal=causal,
        scale=layer.shape.softmax_scale,
    )
    return layer.attention_delta(found[..., : values.shape[-1]].transpose(1, 2))


def target_states(
    target: TargetModel,
    tokens: Tensor,
    *,
    dropout: float = 0.0,
    caches: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Run the target over whole sequences.

    Returns:
        (B, L, layers, D): the state after each layer. Keys and values of each layer are
        appended to `caches` where it is given.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    turn = turn_of(positions, target.shape)
    state = functional.dropout(target.embedding(tokens), dropout)
    states = []
    for layer in target.latent_layers():
        normed = layer.attention_norm(state)
        keys, values = keys_values(layer, layer.rows(normed, turn))
        if caches is not None:
            caches.append((keys, values))
        delta = attend(layer, normed, turn, keys, values, causal=True)
        state = state + functional.dropout(delta, dropout)
        state = state + functional.dropout(layer.mlp_delta(state), dropout)
        states.append(state)
    return torch.stack(states, 2)


@torch.no_grad()
def continue_text(
    target: TargetModel, prompts: Tensor, new: int, *, sampled: int = 0
) -> Tensor:
    """Continue prompts (B, P) by `new` tokens, greedily but for the first `sampled`.

    Only the odd rows sample; the even ones are greedy throughout.
    """
    caches: list[tuple[Tensor, Tensor]] = []
    state = target_states(target, prompts, caches=caches)[:, -1:, -1]
    start = prompts.shape[1]
    grown = [
        (
            functional.pad(keys, (0, 0, 0, new)),
            functional.pad(values, (0, 0, 0, new)),
        )
        for keys, values in caches
    ]
    tokens = [prompts]
    for at in range(start, start + new):
        logits = target.logits(state).float()
        token = logits.argmax(-1)
        if at < start + sampled:
            drawn = torch.multinomial(logits[1::2, 0].softmax(-1), 1)
            token[1::2] = drawn
        tokens.append(token)
        turn = turn_of(torch.full((1,), at, device=prompts.device), target.shape)
        state = target.embedding(token)
        for layer, (keys, values) in zip(target.latent_layers(), grown, strict=True):
            normed = layer.attention_norm(state)
            key, value = keys_values(layer, layer.rows(normed, turn))
            keys[:, :, at : at + 1], values[:, :, at : at + 1] = key, value
            seen = at + 1
            state = state + attend(
                layer, normed, turn, keys[:, :, :seen], values[:, :, :seen]
            )
            state = state + layer.mlp_delta(state)
    return torch.cat(tokens, 1)


def draft_logits(
    drafter: BlockDrafter,
    embedding: Tensor,
    states: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    *,
    causal: bool = False,
) -> Tensor:
    """Draft a block at each anchor of each sequence.

    Args:
        drafter: The drafter.
        embedding: (vocabulary, D) of the target.
        states: (B, L, layers, D) of the target over the sequences.
        tokens: (B, L) the sequences.
        anchors: (B, A) positions of the last accepted tokens. A block sees the states
            before its anchor, its anchor's token, and its own slots.
        causal: Mask the block causally, which the drafter is not trained for.

    Returns:
        (B, A, K, vocabulary).
    """
    batch, length = tokens.shape
    count, block_len = anchors.shape[1], drafter.shape.block_len
    inside = torch.arange(block_len, device=tokens.device)
    places = torch.arange(length, device=tokens.device)
    positions = (anchors[..., None] + inside).flatten(1)
    block_of = torch.arange(count, device=tokens.device).repeat_interleave(block_len)
    siblings = block_of[:, None] == block_of[None, :]
    if causal:
        slot = inside.repeat(count)
        siblings = siblings & (slot[None, :] <= slot[:, None])
    before = places < anchors.repeat_interleave(block_len, 1)[..., None]
    mask = torch.cat([before, siblings.expand(batch, -1, -1)], -1)[:, None]
    context = drafter.context(states)
    block_turn = turn_of(positions, drafter.shape)
    place_turn = turn_of(places, drafter.shape)
    state = drafter.block(embedding[tokens.gather(1, anchors)]).flatten(1, 2)
    for layer in drafter.latent_layers():
        normed = layer.attention_norm(state)
        rows = [
            layer.rows(layer.attention_norm(context), place_turn),
            layer.rows(normed, block_turn),
        ]
        keys, values = keys_values(layer, torch.cat(rows, 1))
        state = state + attend(layer, normed, block_turn, keys, values, mask=mask)
        state = state + layer.mlp_delta(state)
    logits = drafter.logits(state, embedding)
    return logits.view(batch, count, block_len, -1)[:, :, 1:]
