"""The forward: one decode launch, and a merge where the keys were split."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from mla_decode.forward_check import CheckedCall
    from mla_decode_triton.builder import TritonMLAMetadata, TritonMLAMetadataBuilder


def decode(call: CheckedCall) -> None:
    """Fill the outputs of a checked call, every row."""
    metadata = cast("TritonMLAMetadata", call.metadata)
    builder = cast("TritonMLAMetadataBuilder", metadata.builder)
    if metadata.num_reqs == 0:
        return
    q_rope = call.q[..., LATENT_WIDTH:] if call.q_rope is None else call.q_rope
    builder.launcher.launch(
        metadata.step,
        q_latent=call.q,
        q_rope=q_rope,
        kv_cache=call.kv_cache,
        block_table=metadata.block_table,
        seq_lens=metadata.seq_lens,
        kv_scale=call.kv_scale,
        softmax_scale=call.softmax_scale,
        out=call.out,
        lse=call.lse,
        partial_out=builder.partial_out,
        partial_lse=builder.partial_lse,
    )
