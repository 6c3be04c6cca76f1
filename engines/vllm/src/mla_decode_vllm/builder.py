"""vLLM's builder contract on one side, mla-decode's on the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from mla_decode import (
    CommonAttentionMetadata,
    Dcp,
    Mask,
    normalise_causal,
)
from mla_decode_vllm.decoders import Decoders
from mla_decode_vllm.graphs import can_capture
from mla_decode_vllm.problem import Group, is_draft

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata as VllmMetadata

    from mla_decode import DecodeMetadata, MLADecoder


@dataclass
class BridgedDecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's decode metadata, and the step that the library planned for it."""

    decoder: MLADecoder
    plan: DecodeMetadata


class BridgedMetadataBuilder(MLACommonMetadataBuilder[Any]):
    """Builds a step's metadata through the library.

    One instance a ubatch, as vLLM makes them: the mask of the step is state on it, and
    `_build_decode` keeps vLLM's parameters, seven up to 0.30 and eight from 0.31.
    """

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True
    quantises_query: ClassVar[bool] = False
    """Whether the platform's implementation hands an fp8 cache an fp8 query."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Uniform batches, where the backend that would serve them can be captured."""
        if can_capture(vllm_config, kv_cache_spec, quantised=cls.quantises_query):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names]
        drafts = [is_draft(layer) for layer in layers]
        support = self.get_cudagraph_support(vllm_config, kv_cache_spec)
        self._decode_causal = True
        self.decoders = Decoders(
            Group(
                vllm_config=vllm_config,
                spec=kv_cache_spec,
                has_drafts=any(drafts),
                is_draft_only=all(drafts),
                num_q_heads=self.num_heads * self.dcp_world_size,
                threshold=self.reorder_batch_threshold or 1,
                dcp=self._dcp(),
                has_graphs=support is not AttentionCGSupport.NEVER
                and not vllm_config.model_config.enforce_eager,
                quantises_query=layers[0].impl.supports_quant_query_input,
            ),
            device,
            layer_names,
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: VllmMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Record the step's mask, in one form, and build.

        A non-causal batch of pads alone, a data-parallel rank without work, is legal
        here; vLLM's own build refuses it as not uniform, so it does not see the mask.
        """
        causal = normalise_causal(common_attn_metadata.causal)
        self._decode_causal = causal
        is_idle = not causal and int(common_attn_metadata.query_start_loc_cpu[-1]) == 0
        shown = causal or is_idle
        if common_attn_metadata.causal is not shown:
            common_attn_metadata = replace(common_attn_metadata, causal=shown)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.causal = causal
        return metadata

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int | None = None,
        dcp_tot_seq_lens_device: torch.Tensor | None = None,
    ) -> BridgedDecodeMetadata:
        """Hand vLLM's decode batch to the library.

        ``max_query_len`` is a bound that vLLM clamps to its decode threshold; the
        lengths themselves say more, so it counts only where all of them are 0.
        """
        decoder = self.decoders.of(
            Mask.CAUSAL if self._decode_causal else Mask.NON_CAUSAL
        )
        problem = decoder.problem
        num_reqs = seq_lens_device.shape[0]
        starts = query_start_loc_cpu.numpy()
        longest = int((starts[1:] - starts[:-1]).max(initial=0))
        if not longest:
            longest = max_query_len or num_decode_tokens // num_reqs
        reach = block_table_tensor.shape[1] * problem.page_size
        totals = dcp_tot_seq_lens_device
        plan = decoder.plan(
            CommonAttentionMetadata(
                query_start_loc=query_start_loc_device,
                query_start_loc_cpu=query_start_loc_cpu,
                seq_lens=seq_lens_device if totals is None else totals,
                num_reqs=num_reqs,
                num_actual_tokens=num_decode_tokens,
                max_query_len=longest,
                max_seq_len=min(max_seq_len, reach, problem.max_model_len),
                block_table_tensor=block_table_tensor,
                causal=self._decode_causal,
                dcp_local_seq_lens=None if totals is None else seq_lens_device,
            )
        )
        return BridgedDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=totals,
            decoder=decoder,
            plan=plan,
        )

    def _dcp(self) -> Dcp | None:
        if self.dcp_world_size == 1:
            return None
        from vllm.distributed.parallel_state import (  # noqa: PLC0415 - DCP only
            get_dcp_group,
        )

        return Dcp(
            world=self.dcp_world_size,
            rank=get_dcp_group().rank_in_group,
            interleave=self.cp_kv_cache_interleave_size,
        )
