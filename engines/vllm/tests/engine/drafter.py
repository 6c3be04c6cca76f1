"""A block drafter (DFlash) with MLA layers: a model of the tests' own, outside vLLM.

Queries are the last token and K mask tokens; the target's hidden states become the
context's keys, straight in the cache. Its layers say that a block of theirs is
non-causal, which no stock backend on a CPU serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.deepseek_v2 import (
    DeepseekV2MLAAttention,
    DeepseekV2MLP,
)
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

ARCHITECTURE = "DFlashTinyMlaDraftModel"


def register() -> None:
    """The tests' plugin: make the architecture known in every process of vLLM's."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:TinyMlaDraft")


class _Layer(nn.Module):
    def __init__(self, vllm_config: VllmConfig, config, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )
        self.self_attn = DeepseekV2MLAAttention(
            vllm_config=vllm_config,
            config=config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            q_lora_rank=None,
            kv_lora_rank=config.kv_lora_rank,
            max_position_embeddings=config.max_position_embeddings,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.self_attn",
            non_causal_multi_token_decode=True,
        )
        self.mlp = DeepseekV2MLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            prefix=f"{prefix}.mlp",
        )

    def forward(self, positions, hidden):
        hidden = hidden + self.self_attn(positions, self.input_layernorm(hidden), None)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def store(self, states, positions, slots) -> None:
        """Write the context's keys: [tokens, hidden] to the cache rows `slots`."""
        attention = self.self_attn
        row, _ = attention.kv_a_proj_with_mqa(states)
        latent, rope = row.split([attention.kv_lora_rank, 64], dim=-1)
        latent = attention.kv_a_layernorm(latent.contiguous())
        rope = rope.unsqueeze(1).contiguous()
        rope, _ = attention.rotary_emb(positions, rope, rope.clone())
        layer = attention.mla_attn.mla_attn
        if slots is not None:
            layer.impl.do_kv_cache_update(
                latent, rope, layer.kv_cache, slots, "auto", layer._k_scale
            )


class _Model(nn.Module):
    def __init__(self, vllm_config: VllmConfig, config, start: int) -> None:
        super().__init__()
        self.use_aux_hidden_state = True
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size
        )
        self.fc = ReplicatedLinear(
            config.hidden_size, config.hidden_size, bias=False, return_bias=False
        )
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            _Layer(vllm_config, config, f"model.layers.{start + index}")
            for index in range(config.num_hidden_layers)
        )

    def precompute_and_store_context_kv(
        self, context_states, context_positions, context_slot_mapping=None
    ) -> None:
        states = self.hidden_norm(context_states)
        for layer in self.layers:
            layer.store(states, context_positions, context_slot_mapping)

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, input_ids, positions, inputs_embeds=None):
        hidden = (
            self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        )
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return self.norm(hidden)


class TinyMlaDraft(DFlashQwen3ForCausalLM):
    """vLLM's proposer accepts drafters of this family only; nothing is inherited."""

    has_own_embed_tokens = False
    has_own_lm_head = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        del prefix  # vLLM gives none to a drafter
        nn.Module.__init__(self)
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        self.draft_id_to_target_id = None
        start = vllm_config.model_config.get_total_num_hidden_layers()
        self.model = _Model(vllm_config, self.config, start)
        self.lm_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        mapper = WeightsMapper(
            orig_to_new_stacked={
                ".gate_proj": (".gate_up_proj", 0),
                ".up_proj": (".gate_up_proj", 1),
            }
        )
        return AutoWeightsLoader(self).load_weights(weights, mapper=mapper)
