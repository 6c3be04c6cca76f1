"""The reference's forward: a few requests at a time; empty rows are written EMPTY."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from mla_decode.reference.kernel import Request, Wave, fused_dtype
from mla_decode.reference.pieces import PieceReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from mla_decode.forward_check import CheckedCall
    from mla_decode.reference.builder import ReferenceMetadata


REQUESTS_AT_ONCE = 4
"""Requests that are walked together: enough to keep a few cores busy."""


def reference_forward(call: CheckedCall) -> None:
    """Fill the outputs of a checked call, every row."""
    metadata = cast("ReferenceMetadata", call.metadata)
    fused = fused_dtype(call.q, call.kv_cache, call.out)
    reader, scale = PieceReader(call.kv_cache), _scale(call)
    page_size = call.kv_cache.shape[1]
    for rows, numbers in _waves(metadata):
        requests = [
            Request(
                pages=metadata.block_table[number, : -(-seq_len // page_size)],
                seq_len=seq_len,
            )
            for number in numbers
            for seq_len in [metadata.seq_lens_host[number]]
        ]
        if not requests:
            _write_empty(call, rows)
            continue
        is_block = rows.stop - rows.start > len(requests)
        wave = Wave(
            call.q[rows],
            requests,
            reader,
            scale=scale,
            is_causal=metadata.causal and is_block,
            fused=fused,
        )
        out, lse = wave.walk()
        if call.kv_scale is not None:
            out *= call.kv_scale
        call.out[rows] = out.view_as(call.out[rows])
        if call.lse is not None:
            call.lse[rows] = lse.view_as(call.lse[rows])


def _waves(metadata: ReferenceMetadata) -> Iterator[tuple[slice, list[int]]]:
    """All rows in order: those of requests to walk together, or of none that has keys.

    Requests of a wave have blocks of one length.
    """
    starts, lens = metadata.starts_host, metadata.seq_lens_host
    number, count = 0, len(lens)
    while number < count:
        first, length = number, starts[number + 1] - starts[number]
        has_keys = lens[number] > 0
        most = REQUESTS_AT_ONCE if has_keys else count
        while (
            number < min(first + most, count)
            and (lens[number] > 0) == has_keys
            and starts[number + 1] - starts[number] == length
        ):
            number += 1
        if length:
            rows = slice(starts[first], starts[number])
            yield rows, list(range(first, number)) if has_keys else []
    if starts[-1] < metadata.num_decode_tokens:
        yield slice(starts[-1], metadata.num_decode_tokens), []


def _scale(call: CheckedCall) -> Tensor | float:
    """What multiplies q.k: the softmax scale, times those of fp8 tensors."""
    scale: Tensor | float = call.softmax_scale
    for factor in (call.q_scale, call.kv_scale):
        if factor is not None:
            scale = factor * scale
    return scale


def _write_empty(call: CheckedCall, rows: slice) -> None:
    call.out[rows] = 0
    if call.lse is not None:
        call.lse[rows] = -torch.inf
