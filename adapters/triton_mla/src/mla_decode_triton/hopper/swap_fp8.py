# mypy: ignore-errors
"""The variant for few rows over an fp8 cache: tiles are widened in shared memory.

As `swap`, with a warpgroup between the copying warp and the consumer: a tile arrives as
fp8 in a single buffer whose halves have barriers of their own, and is written as the
query's type into the stage that the consumer reads. Two stages of that type and one fp8
buffer are what fits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from mla_decode_triton.hopper.compat import async_load, reinterpret
from mla_decode_triton.hopper.swap import consume
from mla_decode_triton.hopper.walk import (
    LATENT,
    TILE,
    load_half,
    part_range,
    piece_range,
    signal,
    write_empty,
)

HALF = gl.constexpr(256)


@gluon.jit
def _produce(
    q_latent,
    q_rope,
    kv,
    table,
    table_stride,
    schedule,
    seq_lens,
    out,
    lse,
    q_pieces,
    q_tail,
    raw,
    q_full,
    q_free,
    raw_full,
    raw_free,
    part,
    num_parts,
    num_reqs,
    num_rows,
    num_pages,
    row0,
    ROWS: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
):
    SUB: gl.constexpr = TILE // PIECE
    BYTES: gl.constexpr = q_latent.dtype.primitive_bitwidth // 8
    req0, tile0, req1, tile1, stop, seq_len = part_range(schedule, part)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, _ = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            table_row = table + req.to(gl.int64) * table_stride
            mbarrier.wait(q_free, (item & 1) ^ 1)
            mbarrier.expect(q_full, ROWS * 576 * BYTES)
            for group in gl.static_range(8):
                async_load(
                    q_latent, [req, row0, group * 64], q_full, q_pieces.index(group)
                )
            async_load(q_rope, [req, row0, 0], q_full, q_tail.index(0))
            for tile in range(first, last):
                token0 = tile * TILE
                mbarrier.wait(raw_free.index(0), (step & 1) ^ 1)
                mbarrier.expect(raw_full.index(0), TILE * (HALF + 64))
                load_half(
                    kv,
                    table_row,
                    token0,
                    seq_len,
                    num_pages,
                    raw_full.index(0),
                    raw,
                    8 * SUB,
                    LATENT,
                    1,
                    PAGE,
                    PIECE,
                )
                load_half(
                    kv,
                    table_row,
                    token0,
                    seq_len,
                    num_pages,
                    raw_full.index(0),
                    raw,
                    0,
                    0,
                    4,
                    PAGE,
                    PIECE,
                )
                mbarrier.wait(raw_free.index(1), (step & 1) ^ 1)
                mbarrier.expect(raw_full.index(1), TILE * HALF)
                load_half(
                    kv,
                    table_row,
                    token0,
                    seq_len,
                    num_pages,
                    raw_full.index(1),
                    raw,
                    4 * SUB,
                    HALF,
                    4,
                    PAGE,
                    PIECE,
                )
                step += 1
            item += 1
        seq_len = next_len
    write_empty(
        out, lse, seq_lens, part, num_parts, num_reqs, num_rows, row0, NEEDS_LSE, ROWS
    )


@gluon.jit
def _widen(
    raw,
    left,
    right,
    rope,
    raw_full,
    raw_free,
    left_full,
    right_full,
    free,
    schedule,
    seq_lens,
    part,
):
    """Write each half of a tile in the query's type, as it arrives and there is room."""
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    dtype: gl.constexpr = left.dtype
    req0, tile0, req1, tile1, stop, seq_len = part_range(schedule, part)
    step = 0
    for req in range(req0, stop):
        next_len = gl.load(seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, _ = piece_range(req, seq_len, req0, tile0, req1, tile1)
        for _tile in range(first, last):
            stage = step & 1
            mbarrier.wait(raw_full.index(0), step & 1)
            mbarrier.wait(free.index(stage), ((step >> 1) & 1) ^ 1)
            rope.index(stage).store(raw.index(8).load(BLOCK).to(dtype))
            for group in gl.static_range(4):
                part_of = left.index(stage * 4 + group)
                part_of.store(raw.index(group).load(BLOCK).to(dtype))
            fence_async_shared()
            signal(left_full.index(stage))
            mbarrier.arrive(raw_free.index(0), count=1)
            mbarrier.wait(raw_full.index(1), step & 1)
            for group in gl.static_range(4):
                part_of = right.index(stage * 4 + group)
                part_of.store(raw.index(4 + group).load(BLOCK).to(dtype))
            fence_async_shared()
            signal(right_full.index(stage))
            mbarrier.arrive(raw_free.index(1), count=1)
            step += 1
        seq_len = next_len


@gluon.jit(
    do_not_specialize=[
        "num_heads",
        "query_len",
        "table_stride",
        "num_pages",
        "num_reqs",
        "num_parts",
    ]
)
def swap_fp8_kernel(
    q_latent,
    q_rope,
    kv,
    table,
    seq_lens,
    schedule,
    out,
    lse,
    partial_out,
    partial_lse,
    kv_scale,
    scale_log2,
    num_heads,
    query_len,
    table_stride,
    num_pages,
    num_reqs,
    num_parts,
    CAUSAL: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    PAGE: gl.constexpr,
    ROWS: gl.constexpr,
):
    """As `swap_kernel`; `kv` is fp8 (e4m3), `kv_scale` float32 [1] what it is times."""
    PIECE: gl.constexpr = PAGE if PAGE < TILE else TILE
    SUB: gl.constexpr = TILE // PIECE
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(ROWS * 2, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q_latent.dtype
    row_tile = gl.program_id(0)
    part = gl.program_id(1)
    row0 = row_tile * ROWS
    num_rows = query_len * num_heads

    q_pieces = gl.allocate_shared_memory(dtype, [8, 1, ROWS, 64], q_latent.layout)
    q_tail = gl.allocate_shared_memory(dtype, [1, 1, ROWS, 64], q_rope.layout)
    raw = gl.allocate_shared_memory(kv.dtype, [9 * SUB, 1, PIECE, 64], kv.layout)
    left = gl.allocate_shared_memory(dtype, [8, TILE, 64], MATRIX)
    right = gl.allocate_shared_memory(dtype, [8, TILE, 64], MATRIX)
    rope = gl.allocate_shared_memory(dtype, [2, TILE, 64], MATRIX)
    weights = gl.allocate_shared_memory(dtype, [TILE, ROWS], WEIGHTS)
    raw_view = reinterpret(raw, kv.dtype, [9, TILE, 64], NARROW)
    q_view = reinterpret(q_pieces, dtype, [2, ROWS, HALF], MATRIX)
    q_end = reinterpret(q_tail, dtype, [ROWS, 64], MATRIX)
    left_view = reinterpret(left, dtype, [2, TILE, HALF], MATRIX)
    right_view = reinterpret(right, dtype, [2, TILE, HALF], MATRIX)
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    raw_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    raw_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_bars = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for stage in gl.static_range(2):
        mbarrier.init(left_full.index(stage), count=1)
        mbarrier.init(right_full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
        mbarrier.init(raw_full.index(stage), count=1)
        mbarrier.init(raw_free.index(stage), count=1)
        mbarrier.init(q_bars.index(stage), count=1)
    q_full = q_bars.index(0)
    q_free = q_bars.index(1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    q_view.index(0),
                    q_view.index(1),
                    q_end,
                    left_view,
                    right_view,
                    rope,
                    weights,
                    q_full,
                    q_free,
                    left_full,
                    right_full,
                    free,
                    schedule,
                    seq_lens,
                    out,
                    lse,
                    partial_out,
                    partial_lse,
                    kv_scale,
                    scale_log2,
                    num_heads,
                    query_len,
                    num_rows,
                    row0,
                    part,
                    ROWS,
                    CAUSAL,
                    NEEDS_LSE,
                    PIECE,
                ),
            ),
            (
                _widen,
                (
                    raw_view,
                    left,
                    right,
                    rope,
                    raw_full,
                    raw_free,
                    left_full,
                    right_full,
                    free,
                    schedule,
                    seq_lens,
                    part,
                ),
            ),
            (
                _produce,
                (
                    q_latent,
                    q_rope,
                    kv,
                    table,
                    table_stride,
                    schedule,
                    seq_lens,
                    out,
                    lse,
                    q_pieces,
                    q_tail,
                    raw,
                    q_full,
                    q_free,
                    raw_full,
                    raw_free,
                    part,
                    num_parts,
                    num_reqs,
                    num_rows,
                    num_pages,
                    row0,
                    ROWS,
                    NEEDS_LSE,
                    PAGE,
                    PIECE,
                ),
            ),
        ],
        [4, 1],
        [168, 40],
    )
