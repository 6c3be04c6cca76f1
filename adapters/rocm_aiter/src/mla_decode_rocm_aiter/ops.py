"""A thin layer over AITER: its functions with the mask in, by keyword throughout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode_rocm_aiter.library import load_library

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode_rocm_aiter.library import Library


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The six buffers that `get_mla_metadata_v1` fills for one step."""

    work_meta_data: Tensor
    """uint64 [2]: addresses of the next two."""
    work_indptr: Tensor
    work_info_set: Tensor
    reduce_indptr: Tensor
    reduce_final_map: Tensor
    reduce_partial_map: Tensor


def mla_decode_supports_non_causal(library: Library | None = None) -> bool:
    """Whether the installed AITER can be told a mask; it raises where it cannot.

    Raises:
        OutdatedLibraryError: `mla_decode_fwd` has no parameter `causal`: upgrade rather
            than slide to a slower backend unseen.
        BackendRefused: AITER is absent or does not import.
    """
    library = load_library() if library is None else library
    library.require_non_causal()
    return True


def mla_decode_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_qo: int,
    *,
    sm_scale: float,
    schedule: Schedule | None = None,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    return_lse: bool = False,
    causal: bool = True,
    library: Library | None = None,
) -> Tensor | None:
    """Decode with AITER, page size 1.

    Args:
        q: [rows, heads, 576] bf16 or fp8, contiguous.
        kv_buffer: [tokens, 1, 1, 576] bf16 or fp8; only its first stride is free.
        o: [rows, heads, 512] bf16, written. With folded heads and blocks of several
            tokens AITER gives this tensor object other memory: read it after the call,
            not what it was a view of.
        qo_indptr: int32 [requests + 1], first query row of each request.
        kv_indptr: int32 [requests + 1], first entry of each request in `kv_indices`.
        kv_indices: int32, the cache row of each token of each request.
        kv_last_page_lens: int32 [requests], all 1.
        max_seqlen_qo: Query tokens per request.
        sm_scale: Multiplies the scores. No default: AITER's own is 576**-0.5.
        schedule: Of this step, built with the same mask; None runs the kernel without.
        num_kv_splits: Splits per request without a schedule; with one, the compute
            units. Given, it keeps AITER from dropping the schedule at batch 32.
        num_kv_splits_indptr: int32 [requests + 1], without a schedule.
        q_scale: float32 [1] for an fp8 q.
        kv_scale: float32 [1] for an fp8 cache.
        return_lse: Whether to compute the log-sum-exp.
        causal: The mask. An AITER that knows no mask is called without it, and only
            where the block is causal, or of one token and so of either mask.
        library: The AITER to call; the installed one by default.

    Returns:
        float32 [rows, heads], or None.

    Raises:
        OutdatedLibraryError: A non-causal block on an AITER that knows no mask.
    """
    library = load_library() if library is None else library
    given: dict[str, Any] = {}
    if library.has_causal:
        given["causal"] = causal
    elif not causal and max_seqlen_qo > 1:
        library.require_non_causal()
    if schedule is not None:
        given |= {
            "work_meta_data": schedule.work_meta_data,
            "work_indptr": schedule.work_indptr,
            "work_info_set": schedule.work_info_set,
            "reduce_indptr": schedule.reduce_indptr,
            "reduce_final_map": schedule.reduce_final_map,
            "reduce_partial_map": schedule.reduce_partial_map,
        }
    else:
        given["num_kv_splits_indptr"] = num_kv_splits_indptr
    _, lse = library.decode(
        q=q,
        kv_buffer=kv_buffer,
        o=o,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_lens=kv_last_page_lens,
        max_seqlen_q=max_seqlen_qo,
        page_size=1,
        sm_scale=sm_scale,
        num_kv_splits=num_kv_splits,
        q_scale=q_scale,
        kv_scale=kv_scale,
        return_lse=return_lse,
        **given,
    )
    found: Tensor | None = lse if return_lse else None
    return found


def build_schedule(
    library: Library,
    schedule: Schedule,
    *,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_last_page_lens: Tensor,
    num_heads: int,
    causal: bool,
    query_len: int,
    dtype_q: Any,
    dtype_kv: Any,
) -> None:
    """Fill a step's schedule in place; everything that has a wrong default is given.

    The first twelve arguments have kept their positions since 0.1.10.post2, the mask
    being the sixth; the others moved at 0.1.18 and go by keyword.
    """
    library.build_metadata(
        qo_indptr,
        kv_indptr,
        kv_last_page_lens,
        num_heads,
        1,
        causal,
        schedule.work_meta_data,
        schedule.work_info_set,
        schedule.work_indptr,
        schedule.reduce_indptr,
        schedule.reduce_final_map,
        schedule.reduce_partial_map,
        page_size=1,
        kv_granularity=16,
        max_seqlen_qo=query_len,
        uni_seqlen_qo=query_len,
        fast_mode=True,
        dtype_q=dtype_q,
        dtype_kv=dtype_kv,
    )
