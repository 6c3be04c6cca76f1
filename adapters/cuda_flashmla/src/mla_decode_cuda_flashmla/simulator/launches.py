"""The library's compiled entry points: its checks, in its order, then the launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mla_decode_cuda_flashmla.limits import (
    ALIGNMENT_BYTES,
    H200_SMS,
    PAGE_SIZE,
    TILE_ROWS,
    num_sm_parts,
)
from mla_decode_cuda_flashmla.simulator import ops
from mla_decode_cuda_flashmla.simulator.faults import (
    driver_call,
    host_assertion,
    host_check,
)

if TYPE_CHECKING:
    from torch import Tensor

_SHARED_MEMORY_BYTES = 227 * 1024
_FIXED_REQUESTS = 4096


def plan_sched_meta(seq_lens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Plan for the 2026 kernel."""
    driver_call(
        4 * (5 * seq_lens.shape[0] + 1) <= _SHARED_MEMORY_BYTES,
        "invalid argument: more dynamic shared memory than a block has",
    )
    return _plan(seq_lens, num_sm_parts(num_rows, H200_SMS), "sm90")


def plan_tile_metadata(seq_lens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Plan for the first kernel and for fp8."""
    host_check(seq_lens.is_contiguous(), "seqlens_k must be contiguous")
    host_check(seq_lens.dtype == torch.int32, "seqlens_k must have dtype int32")
    host_assertion(seq_lens.shape[0] < _FIXED_REQUESTS, "batch_size < MaxBatchSize")
    num_lists = H200_SMS // -(-num_rows // TILE_ROWS)
    host_check(num_lists > 0, "no work list: more row tiles than multiprocessors")
    return _plan(seq_lens, num_lists, "first")


def _plan(seq_lens: Tensor, num_lists: int, model: str) -> tuple[Tensor, Tensor]:
    tiles, splits = ops.plan(seq_lens, num_lists, model)
    return tiles, splits


def decode(
    q: Tensor,
    cache: Tensor,
    head_dim_v: int,
    seq_lens: Tensor,
    table: Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: tuple[Tensor, Tensor] | None,
    *,
    model: str,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check, plan where there is no schedule yet, and decode.

    Returns:
        (out, lse, work lists, splits).
    """
    is_fp8 = scales != (None, None)
    allowed: Any = (torch.bfloat16, torch.float16)
    host_check(q.dtype in ((torch.float8_e4m3fn,) if is_fp8 else allowed), "q dtype")
    _check_tensors(q, cache, seq_lens, table)
    host_check(q.shape[3] in {512, 576}, "Only head_size_k == 576 or 512 is supported")
    host_check(head_dim_v == 512, "Only head_size_v == 512 is supported")
    host_check(cache.shape[1] == PAGE_SIZE, "Currently page_block_size must be 64")
    host_check(q.shape[0] > 0, "batch size must be positive")
    rows = q.shape[1] * q.shape[2]
    lists = num_sm_parts(rows, H200_SMS)
    if schedule is None:
        schedule = plan_sched_meta(seq_lens, rows)
    tiles, splits = schedule
    host_check(tuple(tiles.shape) == (lists, 8), "tile_scheduler_metadata shape")
    host_check(tuple(splits.shape) == (q.shape[0] + 1,), "num_splits shape")
    host_assertion(q.shape[3] == 576, "params.d == Config::HEAD_DIM_K")
    if model == "sm90":
        _describe_to_copy_engine(q, cache)
    out, lse = ops.decode(
        q,
        cache,
        seq_lens,
        table,
        tiles,
        splits,
        softmax_scale,
        causal,
        model,
        scales[0],
        scales[1],
    )
    return out, lse, tiles, splits


def _check_tensors(q: Tensor, cache: Tensor, seq_lens: Tensor, table: Tensor) -> None:
    host_check(cache.dtype == q.dtype, "query and key must have the same dtype")
    host_check(seq_lens.dtype == torch.int32, "seqlens_k must have dtype int32")
    host_check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    host_check(q.stride(-1) == 1, "q must have contiguous last dimension")
    host_check(cache.stride(-1) == 1, "kcache must have contiguous last dimension")
    host_check(seq_lens.is_contiguous(), "seqlens_k must be contiguous")
    host_check(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    batch = q.shape[0]
    host_check(seq_lens.shape == (batch,), "seqlens_k must have shape (batch_size)")
    host_check(table.shape[0] == batch, "block_table must have batch_size rows")
    host_check(cache.shape[2] == 1 and cache.shape[3] == q.shape[3], "kcache shape")


def _describe_to_copy_engine(q: Tensor, cache: Tensor) -> None:
    """What the driver refuses to encode in a tensor map."""
    steps = [cache.stride(0), cache.stride(1), q.stride(2)]
    sizes = [step * cache.element_size() for step in steps]
    addresses = [cache.data_ptr(), q.data_ptr()]
    driver_call(
        cache.shape[0] > 0
        and not any(number % ALIGNMENT_BYTES for number in (*sizes, *addresses)),
        "invalid argument: a tensor map's address or stride is not aligned",
    )
