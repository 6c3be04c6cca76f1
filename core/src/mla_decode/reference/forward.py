"""The reference's forward: a walk a request, rows of pads and empty rows written EMPTY."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from mla_decode.reference.kernel import walk_request

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.forward_check import CheckedCall
    from mla_decode.reference.builder import ReferenceMetadata


def reference_forward(call: CheckedCall) -> None:
    """Fill the outputs of a checked call, every row."""
    metadata = cast("ReferenceMetadata", call.metadata)
    starts = metadata.starts_host
    page_size = call.kv_cache.shape[1]
    for request, seq_len in enumerate(metadata.seq_lens_host):
        rows = slice(starts[request], starts[request + 1])
        query_len = rows.stop - rows.start
        if seq_len == 0 or query_len == 0:
            _write_empty(call, rows)
            continue
        query = _scaled_query(call, rows)
        pages = metadata.block_table[request, : -(-seq_len // page_size)].long()
        visible = None
        if metadata.causal and query_len > 1:
            tokens = torch.arange(query_len, device=query.device)
            visible = tokens + (seq_len - query_len + 1)
        out, lse = walk_request(query, call.kv_cache, pages, seq_len, visible)
        if call.kv_scale is not None:
            out = out * call.kv_scale
        call.out[rows] = out.to(call.out.dtype)
        if call.lse is not None:
            call.lse[rows] = lse.to(call.lse.dtype)
    _write_empty(call, slice(starts[-1], metadata.num_decode_tokens))


def _scaled_query(call: CheckedCall, rows: slice) -> Tensor:
    query = call.q[rows].float() * call.softmax_scale
    for scale in (call.q_scale, call.kv_scale):
        if scale is not None:
            query = query * scale
    return query


def _write_empty(call: CheckedCall, rows: slice) -> None:
    call.out[rows] = 0
    if call.lse is not None:
        call.lse[rows] = -torch.inf
