"""The reference's forward: a few requests at a time; empty rows are written EMPTY."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from mla_decode.reference.kernel import Request, Wave, fused_dtype
from mla_decode.reference.pieces import PieceReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from mla_decode.forward_check import CheckedCall
    from mla_decode.reference.builder import (
        ReferenceMetadata,
        ReferenceMetadataBuilder,
    )


REQUESTS_AT_ONCE = 4
"""Requests that are walked together: enough to keep a few cores busy."""


class _Batch(NamedTuple):
    """A step as it is walked: blocks in order, and whose keys each of them sees."""

    owners: Sequence[int]
    """Of each block, the row of the block table."""
    starts: list[int]
    lens: list[int]
    is_causal: bool
    at_once: int
    """Most blocks of one wave."""

    @classmethod
    def of(cls, metadata: ReferenceMetadata) -> _Batch:
        """The requests of a step, a few at a time."""
        starts, lens = metadata.starts_host, metadata.seq_lens_host
        return cls(range(len(lens)), starts, lens, metadata.causal, REQUESTS_AT_ONCE)

    @classmethod
    def token_by_token(cls, metadata: ReferenceMetadata) -> _Batch:
        """Every token a block of its own: no shape hangs on what stands beside it."""
        owners, visible = [], []
        edges = itertools.pairwise(metadata.starts_host)
        for number, (first, last) in enumerate(edges):
            seq_len = metadata.seq_lens_host[number]
            for token in range(first, last):
                hidden = last - 1 - token if metadata.causal else 0
                owners.append(number)
                visible.append(max(0, seq_len - hidden))
        return cls(owners, list(range(len(owners) + 1)), visible, False, 1)


def reference_forward(call: CheckedCall) -> None:
    """Fill the outputs of a checked call, every row."""
    metadata = cast("ReferenceMetadata", call.metadata)
    builder = cast("ReferenceMetadataBuilder", metadata.builder)
    fused = fused_dtype(call.q, call.kv_cache, call.out)
    batch = _Batch.of(metadata)
    if builder.problem.batch_invariant:
        fused, batch = None, _Batch.token_by_token(metadata)
    reader, scale = PieceReader(call.kv_cache), _scale(call)
    page_size = call.kv_cache.shape[1]
    for rows, numbers in _waves(batch, metadata.num_decode_tokens):
        requests = [
            Request(
                pages=metadata.block_table[
                    batch.owners[number], : -(-seq_len // page_size)
                ],
                seq_len=seq_len,
            )
            for number in numbers
            for seq_len in [batch.lens[number]]
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
            is_causal=batch.is_causal and is_block,
            fused=fused,
        )
        out, lse = wave.walk()
        if call.kv_scale is not None:
            out *= call.kv_scale
        call.out[rows] = out.view_as(call.out[rows])
        if call.lse is not None:
            call.lse[rows] = lse.view_as(call.lse[rows])


def _waves(batch: _Batch, num_tokens: int) -> Iterator[tuple[slice, list[int]]]:
    """All rows in order: those of blocks to walk together, or of none that has keys.

    Blocks of a wave have one length.
    """
    starts, lens = batch.starts, batch.lens
    number, count = 0, len(lens)
    while number < count:
        first, length = number, starts[number + 1] - starts[number]
        has_keys = lens[number] > 0
        most = batch.at_once if has_keys else count
        while (
            number < min(first + most, count)
            and (lens[number] > 0) == has_keys
            and starts[number + 1] - starts[number] == length
        ):
            number += 1
        if length:
            rows = slice(starts[first], starts[number])
            yield rows, list(range(first, number)) if has_keys else []
    if starts[-1] < num_tokens:
        yield slice(starts[-1], num_tokens), []


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
