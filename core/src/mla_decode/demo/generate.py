"""Greedy generation, token by token and by speculation, many prompts at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mla_decode.demo.attention import GroupShape, LatentAttention, widest_dtype
from mla_decode.demo.model import turn_of
from mla_decode.mask import Mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mla_decode.demo.attention import CallKind, Serving
    from mla_decode.demo.drafter import BlockDrafter
    from mla_decode.demo.model import TargetModel

PROMPT_BLOCK = 32
"""A prompt is run as causal blocks of this many tokens, the contract's most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one way of generating wrote, and what it took."""

    tokens: tuple[tuple[int, ...], ...]
    """The new tokens of each prompt."""
    margins: tuple[tuple[float, ...], ...]
    """By how much each token's logit beat the next best; empty under speculation."""
    accepted: tuple[tuple[int, ...], ...]
    """Drafted tokens that the target accepted, block by block, of each prompt."""
    decode_s: float
    """Seconds from the end of the prompts to the last token."""
    calls: tuple[CallKind, ...]


class Generator:
    """Both models and the way their attention is served.

    Args:
        target: Whose text is wanted.
        drafter: Trained on that target.
        serving: Who attends. Its dtype is replaced by the widest that is served.
        draft_len: Drafted tokens that a block verifies, at most the drafter's K.
        num_reqs: Most prompts of a call.

    Raises:
        BackendRefused: Nobody serves the target's causal blocks, or the drafter's
            non-causal ones.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: BlockDrafter,
        serving: Serving,
        *,
        draft_len: int,
        num_reqs: int,
    ) -> None:
        device = serving.device.torch_device
        self.target: TargetModel = target.to(device)
        self.drafter: BlockDrafter = drafter.to(device)
        self.draft_len = draft_len
        shape = target.shape
        self.target_group: GroupShape = GroupShape(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            query_lens=frozenset({1, draft_len + 1, PROMPT_BLOCK}),
            mask=Mask.CAUSAL,
            num_reqs=num_reqs,
            max_model_len=shape.max_model_len,
            softmax_scale=shape.softmax_scale,
        )
        self.drafter_group: GroupShape = replace(
            self.target_group,
            num_layers=shape.num_drafter_layers,
            query_lens=frozenset({shape.block_len}),
            mask=Mask.NON_CAUSAL,
        )
        groups = (self.target_group, self.drafter_group)
        self.serving: Serving = replace(serving, dtype=widest_dtype(groups, serving))

    @torch.no_grad()
    def plain(self, prompts: Tensor, num_tokens: int) -> Generation:
        """Generate one token a target pass.

        Args:
            prompts: int64 (prompts, length), the length a multiple of `PROMPT_BLOCK`.
            num_tokens: New tokens of each prompt.
        """
        attention = LatentAttention(self.target_group, self.serving)
        requests = range(len(prompts))
        states = self._read_prompts(attention, prompts)
        began = time.perf_counter()
        token, margin = self._greedy(states[:, -1, -1])
        tokens, margins = [token], [margin]
        for _ in range(num_tokens - 1):
            states = self._target_pass(attention, requests, token[:, None], "decode")
            token, margin = self._greedy(states[:, -1, -1])
            tokens.append(token)
            margins.append(margin)
        return Generation(
            tokens=_rows(torch.stack(tokens, 1)),
            margins=_rows(torch.stack(margins, 1)),
            accepted=(),
            decode_s=time.perf_counter() - began,
            calls=attention.calls(),
        )

    @torch.no_grad()
    def speculative(
        self, prompts: Tensor, num_tokens: int, mask: Mask = Mask.NON_CAUSAL
    ) -> Generation:
        """Generate by blocks: draft, verify in one target pass, keep what agrees.

        Args:
            prompts: As in `plain`.
            num_tokens: New tokens of each prompt.
            mask: Of the draft blocks. The drafter is trained for the non-causal one.
        """
        attention = LatentAttention(self.target_group, self.serving)
        drafting = LatentAttention(replace(self.drafter_group, mask=mask), self.serving)
        states = self._read_prompts(attention, prompts)
        everyone = list(range(len(prompts)))
        self._absorb(drafting, everyone, [prompts.shape[1]] * len(prompts), states)
        began = time.perf_counter()
        anchors, _ = self._greedy(states[:, -1, -1])
        written = [[token] for token in anchors.tolist()]
        accepted: list[list[int]] = [[] for _ in everyone]
        active = [request for request in everyone if num_tokens > 1]
        while active:
            anchors = torch.tensor(
                [written[request][-1] for request in active], device=prompts.device
            )
            drafts = self.draft(drafting, active, anchors)[:, : self.draft_len]
            block = torch.cat([anchors[:, None], drafts], 1)
            states = self._target_pass(attention, active, block, "verify")
            greedy, _ = self._greedy(states[:, :, -1])
            agreed = (greedy[:, :-1] == drafts).long().cumprod(1).sum(1).tolist()
            kept = [count + 1 for count in agreed]
            for row, request in enumerate(active):
                length = attention.cache.seq_len(request)
                rejected = self.draft_len - agreed[row]
                attention.cache.truncate(request, length - rejected)
                written[request] += greedy[row, : kept[row]].tolist()
                accepted[request].append(agreed[row])
            self._absorb(drafting, active, kept, states)
            active = [r for r in active if len(written[r]) < num_tokens]
        return Generation(
            tokens=tuple(tuple(tokens[:num_tokens]) for tokens in written),
            margins=(),
            accepted=tuple(map(tuple, accepted)),
            decode_s=time.perf_counter() - began,
            calls=(*attention.calls(), *drafting.calls()),
        )

    @torch.no_grad()
    def draft(
        self, drafting: LatentAttention, requests: Sequence[int], anchors: Tensor
    ) -> Tensor:
        """Draft K tokens after each request's last accepted one, in one pass.

        Args:
            drafting: The drafter's group; holds the rows of all tokens before the
                anchors, and is left as it was.
            requests: Whose blocks they are.
            anchors: int64 (requests,) the last accepted tokens.

        Returns:
            int64 (requests, K).
        """
        embedding = self.target.embedding
        state = self.drafter.block(embedding(anchors))
        step = drafting.begin(requests, self.drafter.shape.block_len, "draft")
        turn = turn_of(step.positions, self.drafter.shape)
        for index, layer in enumerate(self.drafter.latent_layers()):
            normed = layer.attention_norm(state)
            found = drafting.attend(
                index,
                step,
                layer.rows(normed, turn),
                layer.absorbed_queries(normed, turn),
            )
            state = state + layer.attention_delta(layer.values(found))
            state = state + layer.mlp_delta(state)
        for request in requests:
            before = drafting.cache.seq_len(request) - self.drafter.shape.block_len
            drafting.cache.truncate(request, before)
        return self.drafter.logits(state[:, 1:], embedding.weight).argmax(-1)

    def _read_prompts(self, attention: LatentAttention, prompts: Tensor) -> Tensor:
        """Run prompts as causal blocks; returns (prompts, length, layers, D)."""
        requests = range(len(prompts))
        return torch.cat(
            [
                self._target_pass(attention, requests, block, "prompt")
                for block in torch.split(prompts, PROMPT_BLOCK, dim=1)
            ],
            1,
        )

    def _target_pass(
        self,
        attention: LatentAttention,
        requests: Sequence[int],
        tokens: Tensor,
        kind: str,
    ) -> Tensor:
        """Run the target over a block (requests, Q): the state after each layer."""
        step = attention.begin(requests, tokens.shape[1], kind)
        turn = turn_of(step.positions, self.target.shape)
        state = self.target.embedding(tokens)
        states = []
        for index, layer in enumerate(self.target.latent_layers()):
            normed = layer.attention_norm(state)
            found = attention.attend(
                index,
                step,
                layer.rows(normed, turn),
                layer.absorbed_queries(normed, turn),
            )
            state = state + layer.attention_delta(layer.values(found))
            state = state + layer.mlp_delta(state)
            states.append(state)
        return torch.stack(states, 2)

    def _absorb(
        self,
        drafting: LatentAttention,
        requests: Sequence[int],
        counts: Sequence[int],
        states: Tensor,
    ) -> None:
        """Give the drafter its rows of accepted tokens, from the target's states.

        Args:
            drafting: The drafter's group.
            requests: Whose tokens they are.
            counts: How many of each request's tokens in `states` were accepted.
            states: (requests, Q, layers, D), the accepted ones first.
        """
        keep = torch.arange(states.shape[1]) < torch.tensor(counts)[:, None]
        starts = [drafting.cache.seq_len(request) for request in requests]
        positions = torch.tensor(starts)[:, None] + torch.arange(states.shape[1])
        keep, positions = keep.to(states.device), positions.to(states.device)
        context = self.drafter.context(states[keep])
        turn = turn_of(positions[keep], self.drafter.shape)
        rows = [
            layer.rows(layer.attention_norm(context), turn)
            for layer in self.drafter.latent_layers()
        ]
        drafting.fill(requests, counts, torch.stack(rows))

    def _greedy(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the best next token, and say by how much it won."""
        best = self.target.logits(state).topk(2, dim=-1)
        return best.indices[..., 0], best.values[..., 0] - best.values[..., 1]


def _rows(table: Tensor) -> tuple[tuple[int, ...], ...]:
    """Turn a (prompts, tokens) tensor into plain tuples."""
    return tuple(map(tuple, table.tolist()))
