# mypy: ignore-errors
"""The variant for few rows (Q * H <= 32): operands swapped, one consumer warpgroup.

Scores^T = K Q^T and out^T = V^T P^T, so that the 64-row operand of the matrix unit is
the cache and few rows need no padding to 64. See `docs/hopper.md`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_decode_triton.hopper.compat import async_load, barrier, reinterpret
from mla_decode_triton.hopper.walk import (
    LATENT,
    LN2,
    LOWEST,
    TILE,
    load_half,
    part_range,
    piece_range,
    signal,
    tile_tokens,
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
    left,
    right,
    rope,
    q_full,
    q_free,
    left_full,
    right_full,
    free,
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
                stage = step & 1
                token0 = tile * TILE
                mbarrier.wait(free.index(stage), ((step >> 1) & 1) ^ 1)
                mbarrier.expect(left_full.index(stage), TILE * (HALF + 64) * BYTES)
                load_half(
                    kv,
                    table_row,
                    token0,
                    seq_len,
                    num_pages,
                    left_full.index(stage),
                    rope,
                    stage * SUB,
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
                    left_full.index(stage),
                    left,
                    stage * (4 * SUB),
                    0,
                    4,
                    PAGE,
                    PIECE,
                )
                mbarrier.expect(right_full.index(stage), TILE * HALF * BYTES)
                load_half(
                    kv,
                    table_row,
                    token0,
                    seq_len,
                    num_pages,
                    right_full.index(stage),
                    right,
                    stage * (4 * SUB),
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
def _store_half(
    acc,
    factor,
    out,
    partial_out,
    base,
    slot_base,
    row0,
    num_rows,
    is_split,
    COLUMN: gl.constexpr,
    ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    columns = COLUMN + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    inside = (rows < num_rows)[None, :]
    values = acc * factor[None, :]
    if is_split:
        offsets = (slot_base + rows)[None, :] * LATENT + columns[:, None]
        gl.store(partial_out + offsets, values, mask=inside)
    else:
        offsets = (base + rows)[None, :] * LATENT + columns[:, None]
        gl.store(out + offsets, values.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def consume(
    q_left,
    q_right,
    q_end,
    left,
    right,
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
    ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    PIECE: gl.constexpr,
):
    """Score, weigh and multiply every tile; store what an item has become."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PER_ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    dtype: gl.constexpr = q_left.dtype
    value_scale = 1.0
    if kv_scale is not None:
        value_scale = gl.load(kv_scale)
        scale_log2 = scale_log2 * value_scale
    rows = row0 + gl.arange(0, ROWS, layout=PER_ROW)
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, layout=LAYOUT)
    req0, tile0, req1, tile1, stop, seq_len = part_range(schedule, part)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, num_tiles = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            visible = gl.full([ROWS], 0, gl.int32, layout=PER_ROW) + seq_len
            least_visible = seq_len
            if CAUSAL:
                visible = visible - (query_len - 1 - rows // num_heads)
                least_visible = seq_len - (query_len - 1)
            peak = gl.full([ROWS], LOWEST, gl.float32, layout=PER_ROW)
            total = gl.full([ROWS], 0.0, gl.float32, layout=PER_ROW)
            acc_left = gl.full([HALF, ROWS], 0.0, gl.float32, layout=LAYOUT)
            acc_right = gl.full([HALF, ROWS], 0.0, gl.float32, layout=LAYOUT)
            mbarrier.wait(q_full, item & 1)
            for tile in range(first, last):
                stage = step & 1
                parity = (step >> 1) & 1
                mbarrier.wait(left_full.index(stage), parity)
                scores = warpgroup_mma(
                    rope.index(stage),
                    q_end.permute((1, 0)),
                    zeros,
                    use_acc=False,
                    is_async=True,
                )
                scores = warpgroup_mma(
                    left.index(stage), q_left.permute((1, 0)), scores, is_async=True
                )
                mbarrier.wait(right_full.index(stage), parity)
                scores = warpgroup_mma(
                    right.index(stage), q_right.permute((1, 0)), scores, is_async=True
                )
                scores = warpgroup_mma_wait(0, deps=[scores])
                token0 = tile * TILE
                if token0 + TILE > least_visible:
                    tokens = tile_tokens(
                        token0, seq_len, PIECE, gl.SliceLayout(1, LAYOUT)
                    )
                    seen = tokens[:, None] < visible[None, :]
                    scores = gl.where(seen, scores, float("-inf"))
                new_peak = gl.maximum(peak, gl.max(scores, 0))
                decay = gl.exp2((peak - new_peak) * scale_log2)
                p = gl.exp2(scores * scale_log2 - (new_peak * scale_log2)[None, :])
                peak = new_peak
                weights.store(p.to(dtype))
                fence_async_shared()
                barrier()
                acc_left = acc_left * decay[None, :]
                acc_right = acc_right * decay[None, :]
                product_left = warpgroup_mma(
                    left.index(stage).permute((1, 0)), weights, acc_left, is_async=True
                )
                product_right = warpgroup_mma(
                    right.index(stage).permute((1, 0)),
                    weights,
                    acc_right,
                    is_async=True,
                )
                total = total * decay + gl.sum(p, 0)
                acc_left, acc_right = warpgroup_mma_wait(
                    0, deps=[product_left, product_right]
                )
                signal(free.index(stage))
                step += 1
            signal(q_free)
            base = req.to(gl.int64) * num_rows
            is_split = (first > 0) | (last < num_tiles)
            slot_base = (part * 2 + gl.where(first == 0, 1, 0)).to(gl.int64) * num_rows
            empty = total == 0.0
            lse_log2 = peak * scale_log2 + gl.log2(gl.where(empty, 1.0, total))
            lse_log2 = gl.where(empty, float("-inf"), lse_log2)
            factor = gl.where(empty, 0.0, value_scale / gl.where(empty, 1.0, total))
            if is_split:
                gl.store(partial_lse + slot_base + rows, lse_log2, mask=rows < num_rows)
            elif NEEDS_LSE:
                gl.store(lse + base + rows, lse_log2 * LN2, mask=rows < num_rows)
            _store_half(
                acc_left,
                factor,
                out,
                partial_out,
                base,
                slot_base,
                row0,
                num_rows,
                is_split,
                0,
                ROWS,
                LAYOUT,
            )
            _store_half(
                acc_right,
                factor,
                out,
                partial_out,
                base,
                slot_base,
                row0,
                num_rows,
                is_split,
                HALF,
                ROWS,
                LAYOUT,
            )
            item += 1
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
def swap_kernel(
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
    """Attend `ROWS` (16 or 32) rows of each request over one part of the tiles.

    As `asym_kernel`, with boxes [1, ROWS, 64] of the queries.
    """
    PIECE: gl.constexpr = PAGE if PAGE < TILE else TILE
    SUB: gl.constexpr = TILE // PIECE
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(ROWS * 2, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = kv.dtype
    row_tile = gl.program_id(0)
    part = gl.program_id(1)
    row0 = row_tile * ROWS
    num_rows = query_len * num_heads

    q_pieces = gl.allocate_shared_memory(dtype, [8, 1, ROWS, 64], q_latent.layout)
    q_tail = gl.allocate_shared_memory(dtype, [1, 1, ROWS, 64], q_rope.layout)
    left = gl.allocate_shared_memory(dtype, [8 * SUB, 1, PIECE, 64], kv.layout)
    right = gl.allocate_shared_memory(dtype, [8 * SUB, 1, PIECE, 64], kv.layout)
    rope = gl.allocate_shared_memory(dtype, [2 * SUB, 1, PIECE, 64], kv.layout)
    weights = gl.allocate_shared_memory(dtype, [TILE, ROWS], WEIGHTS)
    q_view = reinterpret(q_pieces, dtype, [2, ROWS, HALF], MATRIX)
    q_end = reinterpret(q_tail, dtype, [ROWS, 64], MATRIX)
    left_view = reinterpret(left, dtype, [2, TILE, HALF], MATRIX)
    right_view = reinterpret(right, dtype, [2, TILE, HALF], MATRIX)
    rope_view = reinterpret(rope, dtype, [2, TILE, 64], MATRIX)
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_bars = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for stage in gl.static_range(2):
        mbarrier.init(left_full.index(stage), count=1)
        mbarrier.init(right_full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
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
                    rope_view,
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
                    None,
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
                    left,
                    right,
                    rope,
                    q_full,
                    q_free,
                    left_full,
                    right_full,
                    free,
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
        [1],
        [40],
    )
