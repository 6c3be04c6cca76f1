"""The merge kernel: splits of a row become one row, weighted by their log-sum-exp."""

import triton
import triton.language as tl

# tl.max and tl.sum are compiled functions, which interpreted kernels cannot call.
from triton.language.standard import (
    _elementwise_max,
    _sum_combine,
)

_LN2 = tl.constexpr(0.6931471805599453)
_LATENT = tl.constexpr(512)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["partial_lse_ptr", "lse_ptr"],
)
def merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    num_splits,
    NEEDS_LSE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Merge one row's splits over a block of its 512 columns.

    Grid: (rows, 512 / BLOCK_COLUMNS). `partial_out_ptr` float32 [num_splits, rows, 512]
    normalised within its split, `partial_lse_ptr` float32 [rows, num_splits] in log2,
    -inf where a split saw no key; the partial output of such a split is never read.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    splits = tl.arange(0, MAX_SPLITS)
    base = row * num_splits
    num_rows = tl.num_programs(0).to(tl.int64)
    lse = tl.load(
        partial_lse_ptr + base + splits, mask=splits < num_splits, other=float("-inf")
    )
    peak = tl.reduce(lse, 0, _elementwise_max)
    empty = peak == float("-inf")
    safe_peak = tl.where(empty, 0.0, peak)
    total = tl.reduce(tl.exp2(lse - safe_peak), 0, _sum_combine)
    total = tl.where(empty, 1.0, total)
    acc = tl.full([BLOCK_COLUMNS], 0, tl.float32)
    for start in tl.static_range(0, MAX_SPLITS, BLOCK_SPLITS):
        some = start + tl.arange(0, BLOCK_SPLITS)
        some_lse = tl.load(
            partial_lse_ptr + base + some, mask=some < num_splits, other=float("-inf")
        )
        weight = tl.exp2(some_lse - safe_peak) / total
        partial = tl.load(
            partial_out_ptr
            + (some * num_rows + row)[:, None] * _LATENT
            + columns[None, :],
            mask=(some_lse > float("-inf"))[:, None],
            other=0.0,
        )
        acc += tl.reduce(partial * weight[:, None], 0, _sum_combine)
    tl.store(out_ptr + row * _LATENT + columns, acc.to(out_ptr.dtype.element_ty))
    if NEEDS_LSE:
        if tl.program_id(1) == 0:
            natural = (peak + tl.log2(total)) * _LN2
            tl.store(lse_ptr + row, tl.where(empty, float("-inf"), natural))
