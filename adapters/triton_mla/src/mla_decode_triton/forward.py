"""The forward: one decode launch, and a merge where the keys were split."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from mla_decode.forward_check import CheckedCall
    from mla_decode_triton.builder import TritonMLAMetadata, TritonMLAMetadataBuilder


def decode(call: CheckedCall) -> None:
    """Fill the outputs of a checked call, every row."""
    metadata = cast("TritonMLAMetadata", call.metadata)
    builder = cast("TritonMLAMetadataBuilder", metadata.builder)
    builder.launcher.launch(
        metadata.step, call, metadata.block_table, metadata.seq_lens
    )
