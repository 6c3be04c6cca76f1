"""The builder of a lowered problem: the rewritten batch, and the inner backend's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mla_decode.batch import QueryLenSupport
from mla_decode.builder import MLADecodeMetadataBuilder
from mla_decode.lowering.buffers import PaddedRows, VirtualTables
from mla_decode.mask import Mask
from mla_decode.metadata import CommonAttentionMetadata, DecodeMetadata, StepFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mla_decode.backend import Backend
    from mla_decode.builder import Validation
    from mla_decode.device import DeviceInfo
    from mla_decode.lowering.plan import Plan, Rewrite
    from mla_decode.problem import DecodeProblem


@dataclass(slots=True, kw_only=True, eq=False)
class LoweredMetadata(DecodeMetadata):
    """A step's metadata of the inner backend, and the way to it."""

    inner: DecodeMetadata
    block: LoweredBlock

    def facts(self) -> StepFacts:
        """The inner backend's: its kernels are what runs."""
        return self.inner.facts()


class LoweredBlock:
    """One block of the plan, ready to serve: the inner builder and its buffers."""

    def __init__(
        self,
        problem: DecodeProblem,
        rewrite: Rewrite,
        builder: MLADecodeMetadataBuilder,
    ) -> None:
        self.rewrite = rewrite
        self.builder = builder
        info, device = builder.device_info, builder.device
        self.tables: VirtualTables | None = (
            VirtualTables(problem, rewrite, device) if rewrite.num_virtual > 1 else None
        )
        self.padded: PaddedRows | None = (
            PaddedRows(problem, rewrite, info) if rewrite.pad_rows else None
        )

    def build(
        self, table: Tensor, lens: Tensor, max_seq_len: int, totals: Tensor | None
    ) -> DecodeMetadata:
        """Build the inner metadata of one step."""
        if self.tables is not None:
            table, lens = self.tables.fill(table, lens, totals)
        num_reqs = lens.shape[0]
        rewrite = self.rewrite
        query_len = rewrite.lowered.max_query_len
        has_dcp = rewrite.lowered.dcp is not None
        starts_cpu, starts = self.builder.block_starts(num_reqs, query_len)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts_cpu,
            seq_lens=lens,
            num_reqs=num_reqs,
            num_actual_tokens=num_reqs * query_len,
            max_query_len=query_len,
            max_seq_len=max_seq_len,
            block_table_tensor=table,
            causal=rewrite.is_folded or rewrite.mask is Mask.CAUSAL,
            dcp_local_seq_lens=lens if has_dcp else None,
        )
        return self.builder.build(common)


class LoweredBuilder(MLADecodeMetadataBuilder):
    """Builds the inner backend's metadata for the rewritten batch."""

    query_len_support = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode = True
    supports_non_causal_multi_token_dcp = True
    _splits_causal_blocks = True

    inner: ClassVar[Backend]
    plan: ClassVar[Plan]

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        validate: Validation = "host",
    ) -> None:
        super().__init__(problem, device, validate=validate)
        builders: dict[DecodeProblem, MLADecodeMetadataBuilder] = {}
        self._blocks: dict[tuple[int, Mask], LoweredBlock] = {}
        for block in self.plan.blocks:
            rewrite = block.rewrite
            if rewrite.lowered not in builders:
                builders[rewrite.lowered] = self.inner.builder_cls(
                    rewrite.lowered, self.device_info
                )
            self._blocks[rewrite.query_len, rewrite.mask] = LoweredBlock(
                problem, rewrite, builders[rewrite.lowered]
            )

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> LoweredMetadata:
        del query_start_loc_cpu
        query_len = self._decode_query_len
        is_causal = self._decode_causal or query_len == 1
        mask = Mask.CAUSAL if is_causal else Mask.NON_CAUSAL
        block = self._blocks[query_len, mask]
        inner = block.build(
            block_table_tensor, seq_lens_device, max_seq_len, dcp_tot_seq_lens_device
        )
        return LoweredMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_seq_len=max_seq_len,
            num_reqs=seq_lens_device.shape[0],
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            inner=inner,
            block=block,
        )
