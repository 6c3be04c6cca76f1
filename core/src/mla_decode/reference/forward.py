"""The reference's forward: a walk a request; pads and empty rows are written EMPTY."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from mla_decode.reference.kernel import PIECES_AT_ONCE, fused_dtype, walk_request
from mla_decode.reference.pieces import Pieces

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.forward_check import CheckedCall
    from mla_decode.reference.builder import ReferenceMetadata


def reference_forward(call: CheckedCall) -> None:
    """Fill the outputs of a checked call, every row."""
    metadata = cast("ReferenceMetadata", call.metadata)
    starts = metadata.starts_host
    fused = fused_dtype(call.q, call.kv_cache, call.out)
    pieces = Pieces(call.kv_cache, 1 if fused is None else PIECES_AT_ONCE)
    page_size = call.kv_cache.shape[1]
    scale = _scale(call)
    for request, seq_len in enumerate(metadata.seq_lens_host):
        rows = slice(starts[request], starts[request + 1])
        query_len = rows.stop - rows.start
        if seq_len == 0 or query_len == 0:
            _write_empty(call, rows)
            continue
        out, lse = walk_request(
            call.q[rows],
            pieces,
            metadata.block_table[request, : -(-seq_len // page_size)],
            seq_len,
            scale=scale,
            is_causal=metadata.causal and query_len > 1,
            fused=fused,
        )
        if call.kv_scale is not None:
            out *= call.kv_scale
        call.out[rows] = out.view_as(call.out[rows])
        if call.lse is not None:
            call.lse[rows] = lse.view_as(call.lse[rows])
    _write_empty(call, slice(starts[-1], metadata.num_decode_tokens))


def _scale(call: CheckedCall) -> Tensor | float:
    """What multiplies q.k: the softmax scale, times those of fp8 tensors."""
    scale: Tensor | float = call.softmax_scale
    for factor in (call.q_scale, call.kv_scale):
        if factor is not None:
            scale = factor * scale
    return scale


def _write_empty(call: CheckedCall, rows: slice) -> None:
    if rows.start == rows.stop:
        return
    call.out[rows] = 0
    if call.lse is not None:
        call.lse[rows] = -torch.inf
