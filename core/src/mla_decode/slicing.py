"""Cutting a batch between requests: decodes from prefills, ubatch from ubatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from mla_decode.errors import BatchError
from mla_decode.mask import normalise_causal

if TYPE_CHECKING:
    from mla_decode.builder import MLADecodeMetadataBuilder, Validation
    from mla_decode.device import DeviceInfo
    from mla_decode.metadata import CommonAttentionMetadata, DecodeMetadata
    from mla_decode.problem import DecodeProblem


def slice_requests(
    common: CommonAttentionMetadata, start: int, stop: int
) -> CommonAttentionMetadata:
    """The batch of requests ``start..stop``: every field kept, the mask too.

    Tensors are views, but for ``query_start_loc``, which is rebased on the device
    without a synchronisation.
    """
    first, last = _rows(common, start), _rows(common, stop)
    starts_cpu = common.query_start_loc_cpu[start : stop + 1]
    base = int(starts_cpu[0])
    slots, local = common.slot_mapping, common.dcp_local_seq_lens
    longest = int(starts_cpu.diff().max())
    if longest == 0:  # a part of pads alone has the whole batch's Q
        longest = int(common.query_start_loc_cpu.diff().max())
    return replace(
        common,
        query_start_loc=common.query_start_loc[start : stop + 1] - base,
        query_start_loc_cpu=starts_cpu - base,
        seq_lens=common.seq_lens[start:stop],
        num_reqs=stop - start,
        num_actual_tokens=last - first,
        max_query_len=longest or common.max_query_len,
        block_table_tensor=common.block_table_tensor[start:stop],
        slot_mapping=None if slots is None else slots[first:last],
        causal=normalise_causal(common.causal),
        dcp_local_seq_lens=None if local is None else local[start:stop],
    )


def _rows(common: CommonAttentionMetadata, request: int) -> int:
    """Query rows before a request, pad rows counted where the batch counts them."""
    real = int(common.query_start_loc_cpu[request])
    total = int(common.query_start_loc_cpu[-1])
    if common.num_actual_tokens == total:
        return real
    lengths = common.query_start_loc_cpu.diff()
    query_len = int(lengths.max()) or common.max_query_len
    is_uniform = bool(((lengths == query_len) | (lengths == 0)).all())
    if is_uniform and common.num_actual_tokens == common.num_reqs * query_len:
        return request * query_len
    return common.num_actual_tokens if request == common.num_reqs else real


def split_decodes(
    common: CommonAttentionMetadata, max_query_len: int
) -> tuple[CommonAttentionMetadata | None, CommonAttentionMetadata | None]:
    """Split a batch whose decodes stand first into (decodes, the rest).

    A request is a decode where its block is at most ``max_query_len`` tokens; pads
    (length 0) go with the decodes where no prefill stands before them. A non-causal
    batch is decode altogether, whatever its block length.

    Args:
        common: A batch that the engine has reordered, decodes first.
        max_query_len: The longest block that counts as a decode, in tokens.

    Returns:
        The two batches; None for one that would be empty.
    """
    if not normalise_causal(common.causal):
        return common, None
    is_prefill = common.query_start_loc_cpu.diff() > max_query_len
    num_decodes = int(is_prefill.int().argmax()) if bool(is_prefill.any()) else None
    if num_decodes is None:
        return common, None
    if num_decodes == 0:
        return None, common
    decodes = slice_requests(common, 0, num_decodes)
    return decodes, slice_requests(common, num_decodes, common.num_reqs)


def split_ubatches(
    common: CommonAttentionMetadata, cuts: int | Sequence[int]
) -> tuple[CommonAttentionMetadata, ...]:
    """Split a batch into micro-batches between requests; every field is kept.

    Args:
        common: The batch.
        cuts: The number of micro-batches, as even as requests allow; or the query
            rows at which to cut, as an engine that balances tokens chooses them.

    Raises:
        BatchError: More micro-batches than requests, or a cut inside a block: its
            tokens share their keys and a half block has no meaning.
    """
    num_reqs = common.num_reqs
    bounds: list[int] = []
    if isinstance(cuts, Sequence):
        bounds = [0, *(_request_at(common, row) for row in cuts), num_reqs]
    elif isinstance(cuts, int) and cuts > 0:
        bounds = [num_reqs * part // cuts for part in range(cuts + 1)]
    if len(bounds) < 2 or any(a >= b for a, b in pairwise(bounds)):
        raise BatchError(
            "The batch cannot be cut into these micro-batches.",
            got=f"{cuts!r} for {num_reqs} requests",
            allowed=f"1..{num_reqs} micro-batches, or increasing rows inside the batch",
            fix="run a batch of so few requests as one",
        )
    return tuple(
        slice_requests(common, start, stop) for start, stop in pairwise(bounds)
    )


def _request_at(common: CommonAttentionMetadata, row: int) -> int:
    rows = [_rows(common, request) for request in range(common.num_reqs + 1)]
    if row not in rows:
        raise BatchError(
            "A cut falls inside a request's block.",
            got=f"row {row}",
            allowed=f"one of {rows[1:-1]}",
            fix="move the cut to a block's first row",
        )
    return rows.index(row)


class UbatchBuilders:
    """One builder a micro-batch, so that none overwrites another's state.

    Args:
        builder_cls: The backend's builder.
        problem: What the layer group asks.
        device: As for the builder.
        num_ubatches: Micro-batches that run at the same time.
        validate: As for the builder.
    """

    def __init__(
        self,
        builder_cls: type[MLADecodeMetadataBuilder],
        problem: DecodeProblem,
        device: DeviceInfo,
        *,
        num_ubatches: int,
        validate: Validation = "host",
    ) -> None:
        self.builders: tuple[MLADecodeMetadataBuilder, ...] = tuple(
            builder_cls(problem, device, validate=validate) for _ in range(num_ubatches)
        )

    def build(self, common: CommonAttentionMetadata) -> tuple[DecodeMetadata, ...]:
        """Split the batch, one part a builder, and build each part's metadata."""
        parts = split_ubatches(common, len(self.builders))
        return tuple(
            builder.build(part)
            for builder, part in zip(self.builders, parts, strict=True)
        )
