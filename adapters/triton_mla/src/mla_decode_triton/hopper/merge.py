# mypy: ignore-errors
"""The merge of many pieces: all warps of a program share a row, or some columns of one.

Pieces of a split request become its rows, weighted by log-sum-exp. The grid is fixed and
walks the list of split requests of the work table, so that a batch without splits costs a
launch and no more. A unit of work is one row by a block of its 512 columns; all its
pieces are loaded at once, which is what makes it short: the latency of the loads is paid
once, not once a piece.
"""

import triton
import triton.language as tl

# tl.max and tl.sum are compiled functions: interpreted kernels cannot call them.
from triton.language.extra.cuda import gdc_wait
from triton.language.standard import (
    _elementwise_max,
    _sum_combine,
)

_LATENT = tl.constexpr(512)
_HEADER = tl.constexpr(8)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lse"])
def merge_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    table,
    num_rows,
    NEEDS_LSE: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge every split request of the work table. Grid: any number of programs.

    `partial_out` float32 [2 * parts, num_rows, 512], each piece normalised by its own
    sum; `partial_lse` float32 [2 * parts, num_rows] in log2, -inf where a row saw no key
    of a piece. `num_rows` are the rows (token, head) of a request. EARLY: the launch
    overlaps the end of the kernel before it, whose writes are waited for here.
    """
    if EARLY:
        gdc_wait()
    num_units = tl.load(table) * num_rows * (512 // BLOCK_COLUMNS)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        block = unit % (512 // BLOCK_COLUMNS)
        row_unit = unit // (512 // BLOCK_COLUMNS)
        row = row_unit % num_rows
        entry = table + _HEADER + 4 * BLOCK_PARTS + (row_unit // num_rows) * 4
        request = tl.load(entry)
        first_part = tl.load(entry + 1)
        num_pieces = tl.load(entry + 6) - tl.load(entry + 2) + 1
        columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        peak = tl.full([], float("-inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
        acc = tl.full([BLOCK_COLUMNS], 0.0, tl.float32)
        for start in range(0, num_pieces, BLOCK_PIECES):
            piece = start + tl.arange(0, BLOCK_PIECES)
            here = piece < num_pieces
            # The first piece of a request has the odd slot of its part, others even ones.
            slot = (first_part + piece) * 2 + (piece == 0).to(tl.int32)
            place = slot.to(tl.int64) * num_rows + row
            piece_lse = tl.load(partial_lse + place, mask=here, other=float("-inf"))
            values = tl.load(
                partial_out + place[:, None] * _LATENT + columns[None, :],
                mask=here[:, None],
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.reduce(piece_lse, 0, _elementwise_max))
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay = tl.exp2(peak - safe)
            weight = tl.exp2(piece_lse - safe)
            total = total * decay + tl.reduce(weight, 0, _sum_combine)
            acc = acc * decay + tl.reduce(values * weight[:, None], 0, _sum_combine)
            peak = new_peak
        empty = total == 0.0
        safe_total = tl.where(empty, 1.0, total)
        place = request.to(tl.int64) * num_rows + row
        merged = tl.where(empty, 0.0, acc / safe_total)
        tl.store(out + place * _LATENT + columns, merged.to(out.dtype.element_ty))
        if NEEDS_LSE:
            if block == 0:
                natural = (peak + tl.log2(safe_total)) * 0.6931471805599453
                tl.store(lse + place, tl.where(empty, float("-inf"), natural))
