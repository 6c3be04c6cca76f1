# mypy: ignore-errors
"""The variant for many rows: 64 (token, head) rows a program, two consumer warpgroups.

One warpgroup scores every tile and owns output columns 0..255; the other multiplies the
weights into columns 256..511. One warp drives the copy engine. See `docs/hopper.md`.
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

ROWS = gl.constexpr(64)
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
    left_free,
    right_free,
    part,
    num_parts,
    num_reqs,
    num_rows,
    num_pages,
    row0,
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
                parity = ((step >> 1) & 1) ^ 1
                token0 = tile * TILE
                mbarrier.wait(left_free.index(stage), parity)
                mbarrier.expect(left_full.index(stage), TILE * HALF * BYTES)
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
                mbarrier.wait(right_free.index(stage), parity)
                mbarrier.expect(right_full.index(stage), TILE * (HALF + 64) * BYTES)
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
                load_half(
                    kv,
                    table_row,
                    token0,
                    seq_len,
                    num_pages,
                    right_full.index(stage),
                    rope,
                    stage * SUB,
                    LATENT,
                    1,
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
    total,
    out,
    partial_out,
    base,
    slot_base,
    row0,
    num_rows,
    is_split,
    COLUMN: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = COLUMN + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    inside = (rows < num_rows)[:, None]
    empty = total == 0.0
    factor = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
    values = acc * factor[:, None]
    if is_split:
        offsets = (slot_base + rows)[:, None] * LATENT + columns[None, :]
        gl.store(partial_out + offsets, values, mask=inside)
    else:
        offsets = (base + rows)[:, None] * LATENT + columns[None, :]
        gl.store(out + offsets, values.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _issue_scores(
    q_left,
    q_right,
    q_end,
    left,
    right,
    rope,
    left_full,
    right_full,
    step,
    SCORES: gl.constexpr,
):
    """Start the scores of a tile as its halves arrive."""
    stage = step & 1
    parity = (step >> 1) & 1
    zeros = gl.full([ROWS, TILE], 0.0, gl.float32, layout=SCORES)
    mbarrier.wait(left_full.index(stage), parity)
    scores = warpgroup_mma(
        q_left,
        left.index(stage).permute((1, 0)),
        zeros,
        use_acc=False,
        is_async=True,
    )
    mbarrier.wait(right_full.index(stage), parity)
    scores = warpgroup_mma(
        q_right, right.index(stage).permute((1, 0)), scores, is_async=True
    )
    return warpgroup_mma(
        q_end, rope.index(stage).permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def _weigh(
    scores,
    peak,
    total,
    visible,
    least_visible,
    token0,
    seq_len,
    scale_log2,
    decays,
    weights,
    weights_full,
    PIECE: gl.constexpr,
    SCORES: gl.constexpr,
):
    """One online-softmax step; hands the weights to the other warpgroup."""
    if token0 + TILE > least_visible:
        tokens = tile_tokens(token0, seq_len, PIECE, gl.SliceLayout(0, SCORES))
        seen = tokens[None, :] < visible[:, None]
        scores = gl.where(seen, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    decay = gl.exp2((peak - new_peak) * scale_log2)
    p = gl.exp2(scores * scale_log2 - (new_peak * scale_log2)[:, None])
    operand = p.to(weights.dtype)
    # The weights overwrite what the products of other warps may still read.
    barrier()
    decays.store(decay)
    weights.store(operand)
    fence_async_shared()
    signal(weights_full)
    return new_peak, total * decay + gl.sum(p, 1), decay, operand


@gluon.jit
def _score(
    q_left,
    q_right,
    q_end,
    left,
    right,
    rope,
    weights,
    decays,
    totals,
    q_full,
    q_free,
    left_full,
    right_full,
    left_free,
    weights_full,
    item_full,
    schedule,
    seq_lens,
    out,
    lse,
    partial_out,
    partial_lse,
    scale_log2,
    num_heads,
    query_len,
    num_rows,
    row0,
    part,
    CAUSAL: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    AHEAD: gl.constexpr,
    PIECE: gl.constexpr,
    SCORES: gl.constexpr,
    ACC: gl.constexpr,
):
    PER_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    rows = row0 + gl.arange(0, ROWS, layout=PER_ROW)
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
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout=ACC)
            mbarrier.wait(q_full, item & 1)
            if AHEAD:
                scores = _issue_scores(
                    q_left,
                    q_right,
                    q_end,
                    left,
                    right,
                    rope,
                    left_full,
                    right_full,
                    step,
                    SCORES,
                )
                scores = warpgroup_mma_wait(0, deps=[scores])
                for tile in range(first, last - 1):
                    stage = step & 1
                    peak, total, decay, operand = _weigh(
                        scores,
                        peak,
                        total,
                        visible,
                        least_visible,
                        tile * TILE,
                        seq_len,
                        scale_log2,
                        decays.index(stage),
                        weights.index(stage),
                        weights_full.index(stage),
                        PIECE,
                        SCORES,
                    )
                    acc = acc * gl.convert_layout(decay, ACC_ROW)[:, None]
                    product = warpgroup_mma(
                        gl.convert_layout(operand, OPERAND),
                        left.index(stage),
                        acc,
                        is_async=True,
                    )
                    coming = _issue_scores(
                        q_left,
                        q_right,
                        q_end,
                        left,
                        right,
                        rope,
                        left_full,
                        right_full,
                        step + 1,
                        SCORES,
                    )
                    acc = warpgroup_mma_wait(3, deps=[product])
                    signal(left_free.index(stage))
                    scores = warpgroup_mma_wait(0, deps=[coming])
                    step += 1
                signal(q_free)
                tile = last - 1
                stage = step & 1
                peak, total, decay, operand = _weigh(
                    scores,
                    peak,
                    total,
                    visible,
                    least_visible,
                    tile * TILE,
                    seq_len,
                    scale_log2,
                    decays.index(stage),
                    weights.index(stage),
                    weights_full.index(stage),
                    PIECE,
                    SCORES,
                )
                acc = acc * gl.convert_layout(decay, ACC_ROW)[:, None]
                product = warpgroup_mma(
                    gl.convert_layout(operand, OPERAND),
                    left.index(stage),
                    acc,
                    is_async=True,
                )
                acc = warpgroup_mma_wait(0, deps=[product])
                signal(left_free.index(stage))
                step += 1
            else:
                for tile in range(first, last):
                    stage = step & 1
                    scores = _issue_scores(
                        q_left,
                        q_right,
                        q_end,
                        left,
                        right,
                        rope,
                        left_full,
                        right_full,
                        step,
                        SCORES,
                    )
                    scores = warpgroup_mma_wait(0, deps=[scores])
                    if tile == last - 1:
                        signal(q_free)
                    peak, total, decay, operand = _weigh(
                        scores,
                        peak,
                        total,
                        visible,
                        least_visible,
                        tile * TILE,
                        seq_len,
                        scale_log2,
                        decays.index(stage),
                        weights.index(stage),
                        weights_full.index(stage),
                        PIECE,
                        SCORES,
                    )
                    acc = acc * gl.convert_layout(decay, ACC_ROW)[:, None]
                    product = warpgroup_mma(
                        gl.convert_layout(operand, OPERAND),
                        left.index(stage),
                        acc,
                        is_async=True,
                    )
                    acc = warpgroup_mma_wait(0, deps=[product])
                    signal(left_free.index(stage))
                    step += 1
            totals.index(item & 1).store(total)
            signal(item_full.index(item & 1))
            base = req.to(gl.int64) * num_rows
            is_split = (first > 0) | (last < num_tiles)
            slot_base = (part * 2 + gl.where(first == 0, 1, 0)).to(gl.int64) * num_rows
            empty = total == 0.0
            lse_log2 = peak * scale_log2 + gl.log2(gl.where(empty, 1.0, total))
            lse_log2 = gl.where(empty, float("-inf"), lse_log2)
            if is_split:
                gl.store(partial_lse + slot_base + rows, lse_log2, mask=rows < num_rows)
            elif NEEDS_LSE:
                gl.store(lse + base + rows, lse_log2 * LN2, mask=rows < num_rows)
            _store_half(
                acc,
                gl.convert_layout(total, ACC_ROW),
                out,
                partial_out,
                base,
                slot_base,
                row0,
                num_rows,
                is_split,
                0,
                ACC,
            )
            item += 1
        seq_len = next_len


@gluon.jit
def _multiply(
    right,
    weights,
    decays,
    totals,
    right_free,
    weights_full,
    item_full,
    schedule,
    seq_lens,
    out,
    partial_out,
    num_rows,
    row0,
    part,
    ACC: gl.constexpr,
):
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    req0, tile0, req1, tile1, stop, seq_len = part_range(schedule, part)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, num_tiles = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout=ACC)
            for tile in range(first, last):
                stage = step & 1
                mbarrier.wait(weights_full.index(stage), (step >> 1) & 1)
                decay = decays.index(stage).load(ACC_ROW)
                acc = acc * decay[:, None]
                product = warpgroup_mma(
                    weights.index(stage), right.index(stage), acc, is_async=True
                )
                acc = warpgroup_mma_wait(0, deps=[product])
                if tile < last - 1:
                    signal(right_free.index(stage))
                step += 1
            mbarrier.wait(item_full.index(item & 1), (item >> 1) & 1)
            total = totals.index(item & 1).load(ACC_ROW)
            # Only now may the scorer run two tiles ahead: it overwrites the totals.
            signal(right_free.index((step - 1) & 1))
            base = req.to(gl.int64) * num_rows
            is_split = (first > 0) | (last < num_tiles)
            slot_base = (part * 2 + gl.where(first == 0, 1, 0)).to(gl.int64) * num_rows
            _store_half(
                acc,
                total,
                out,
                partial_out,
                base,
                slot_base,
                row0,
                num_rows,
                is_split,
                HALF,
                ACC,
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
def asym_kernel(
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
    AHEAD: gl.constexpr,
):
    """Attend 64 rows of each request over one part of the batch's tiles.

    Grid: (row tiles, parts). `q_latent` and `q_rope` are descriptors of [requests, rows,
    512] and [requests, rows, 64] with boxes [1, 64, 64]; `kv` of [pages, page, 576] with
    boxes [1, min(page, 64), 64]. `schedule` is `plan_kernel`'s. Pieces of a split
    request go to `partial_out` float32 [2 * parts, rows, 512] and `partial_lse` float32
    [2 * parts, rows] (log2); all else to `out` [requests * rows, 512] and `lse`. AHEAD:
    start the scores of the next tile before the values of this one are multiplied, for
    batches bound by arithmetic; it frees a tile's memory later.
    """
    PIECE: gl.constexpr = PAGE if PAGE < TILE else TILE
    SUB: gl.constexpr = TILE // PIECE
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
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
    decays = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    totals = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    q_view = reinterpret(q_pieces, dtype, [2, ROWS, HALF], MATRIX)
    q_end = reinterpret(q_tail, dtype, [ROWS, 64], MATRIX)
    left_view = reinterpret(left, dtype, [2, TILE, HALF], MATRIX)
    right_view = reinterpret(right, dtype, [2, TILE, HALF], MATRIX)
    rope_view = reinterpret(rope, dtype, [2, TILE, 64], MATRIX)
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    left_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    right_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    weights_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    item_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_bars = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for stage in gl.static_range(2):
        mbarrier.init(left_full.index(stage), count=1)
        mbarrier.init(right_full.index(stage), count=1)
        mbarrier.init(left_free.index(stage), count=1)
        mbarrier.init(right_free.index(stage), count=1)
        mbarrier.init(weights_full.index(stage), count=1)
        mbarrier.init(item_full.index(stage), count=1)
        mbarrier.init(q_bars.index(stage), count=1)
    q_full = q_bars.index(0)
    q_free = q_bars.index(1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _score,
                (
                    q_view.index(0),
                    q_view.index(1),
                    q_end,
                    left_view,
                    right_view,
                    rope_view,
                    rope_view,
                    decays,
                    totals,
                    q_full,
                    q_free,
                    left_full,
                    right_full,
                    left_free,
                    weights_full,
                    item_full,
                    schedule,
                    seq_lens,
                    out,
                    lse,
                    partial_out,
                    partial_lse,
                    scale_log2,
                    num_heads,
                    query_len,
                    num_rows,
                    row0,
                    part,
                    CAUSAL,
                    NEEDS_LSE,
                    AHEAD,
                    PIECE,
                    SCORES,
                    ACC,
                ),
            ),
            (
                _multiply,
                (
                    right_view,
                    rope_view,
                    decays,
                    totals,
                    right_free,
                    weights_full,
                    item_full,
                    schedule,
                    seq_lens,
                    out,
                    partial_out,
                    num_rows,
                    row0,
                    part,
                    ACC,
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
                    left_free,
                    right_free,
                    part,
                    num_parts,
                    num_reqs,
                    num_rows,
                    num_pages,
                    row0,
                    NEEDS_LSE,
                    PAGE,
                    PIECE,
                ),
            ),
        ],
        [4, 1],
        [208, 40],
    )
