"""One decode call: heads padded, AITER called, heads and the contract restored."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

import torch

from mla_decode import ArgumentError
from mla_decode_rocm_aiter.ops import mla_decode_fwd

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode import CheckedCall
    from mla_decode_rocm_aiter.builder import AiterMLAMetadataBuilder
    from mla_decode_rocm_aiter.metadata import AiterMLAMetadata

_LARGEST_ROW = (1 << 31) - 1


def aiter_forward(call: CheckedCall) -> None:
    """Fill `call.out` and `call.lse`, every row, with AITER."""
    metadata = cast("AiterMLAMetadata", call.metadata)
    builder = cast("AiterMLAMetadataBuilder", metadata.builder)
    padded = metadata.route.heads != builder.problem.num_q_heads
    query, head_stride = _query(call.q, builder)
    # A tensor object of its own: AITER may re-point the one it is given.
    given = builder.padded_output(query.shape[0]) if padded else call.out
    target = given.view(given.shape)
    address = target.data_ptr()
    with _on_device(builder):
        lse = mla_decode_fwd(
            query,
            _cache_rows(call.kv_cache, builder),
            target,
            metadata.query_start_loc,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.kv_last_page_lens,
            metadata.query_len,
            sm_scale=call.softmax_scale,
            schedule=metadata.schedule,
            num_kv_splits=metadata.num_kv_splits,
            num_kv_splits_indptr=metadata.num_kv_splits_indptr,
            q_scale=call.q_scale,
            kv_scale=call.kv_scale,
            return_lse=call.lse is not None,
            causal=metadata.causal,
            library=builder.library,
        )
    if padded or target.data_ptr() != address:
        call.out.copy_(_own_heads(target, call.out.shape[1], head_stride))
    _write_empty(call.out, metadata, 0.0)
    if call.lse is not None and lse is not None:
        call.lse.copy_(_own_heads(lse, call.lse.shape[1], head_stride))
        _write_empty(call.lse, metadata, -torch.inf)


def _query(q: Tensor, builder: AiterMLAMetadataBuilder) -> tuple[Tensor, int]:
    """The query with the heads that AITER takes, contiguous, and its heads' distance.

    A query that is a view into a buffer with room for the padded heads is widened in
    place: what stands in the spare heads is a head of nobody's.
    """
    rows, heads, width = q.shape
    wanted = builder.padded_heads
    if heads == wanted and q.is_contiguous():
        return q, 1
    if _has_room(q, wanted):
        return q.as_strided((rows, wanted, width), (wanted * width, width, 1)), 1
    return _gather_heads(q, builder), builder.head_stride


def _has_room(q: Tensor, wanted: int) -> bool:
    rows, heads, width = q.shape
    if heads == wanted or q.stride() != (wanted * width, width, 1):
        return False
    last = q.storage_offset() + rows * wanted * width
    return last * q.element_size() <= q.untyped_storage().nbytes()


def _gather_heads(q: Tensor, builder: AiterMLAMetadataBuilder) -> Tensor:
    """Copy the heads into the builder's buffer: each repeated, or the list tiled."""
    buffer = builder.padded_query(q.shape[0])
    as_bytes = torch.uint8 if q.element_size() == 1 else q.dtype
    torch.index_select(
        q.view(as_bytes), 1, builder.head_order, out=buffer.view(as_bytes)
    )
    return buffer


def _own_heads(padded: Tensor, heads: int, head_stride: int) -> Tensor:
    """The problem's heads among the padded ones: every n-th, or the first."""
    return padded[:, : heads * head_stride : head_stride]


def _write_empty(tensor: Tensor, metadata: AiterMLAMetadata, value: float) -> None:
    """Rows without a key: AITER leaves NaN, +inf or nothing at all there.

    Unconditional: lengths live on the device.
    """
    mask = metadata.is_empty
    tensor.view(*mask.shape[:2], -1).masked_fill_(mask, value)


def _cache_rows(cache: Tensor, builder: AiterMLAMetadataBuilder) -> Tensor:
    pages, page_size, _ = cache.shape
    last = builder.units.rows_of(pages, page_size) - 1
    if last > _LARGEST_ROW:
        raise ArgumentError(
            "The cache has more rows than AITER's 32-bit index list can name.",
            got=f"{pages} pages of {page_size} tokens",
            allowed=f"rows up to {_LARGEST_ROW}",
            fix="use a cache with fewer pages per rank, or pages back to back",
        )
    return builder.units.view(cache)


def _on_device(
    builder: AiterMLAMetadataBuilder,
) -> contextlib.AbstractContextManager[object]:
    """AITER asks the current device, not the tensors' own."""
    if builder.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.device(builder.device)
