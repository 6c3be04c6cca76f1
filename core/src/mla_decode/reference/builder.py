"""The reference's metadata: the batch, with its lengths on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla_decode.batch import QueryLenSupport
from mla_decode.builder import GraphSupport, MLADecodeMetadataBuilder
from mla_decode.metadata import DecodeMetadata, StepFacts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class ReferenceMetadata(DecodeMetadata):
    """The lengths and block starts as Python ints."""

    seq_lens_host: list[int]
    starts_host: list[int]

    def facts(self) -> StepFacts:
        """Torch's own operators; a walk is never split."""
        found = DecodeMetadata.facts(self)
        return replace(found, path="torch", max_splits=1)


class ReferenceMetadataBuilder(MLADecodeMetadataBuilder):
    """Any mix of blocks."""

    query_len_support = QueryLenSupport.VARLEN
    graph_support = GraphSupport.NEVER
    supports_non_causal_multi_token_decode = True
    supports_non_causal_multi_token_dcp = True
    host_reads_lengths = True

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> ReferenceMetadata:
        return ReferenceMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_seq_len=max_seq_len,
            num_reqs=seq_lens_device.shape[0],
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            seq_lens_host=seq_lens_device.tolist(),
            starts_host=query_start_loc_cpu.tolist(),
        )
