# mypy: ignore-errors
"""The variant for few rows a program, 16 or 32: operands swapped, one consumer warpgroup.

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

from mla_decode_triton.hopper.compat import barrier
from mla_decode_triton.hopper.copying import produce
from mla_decode_triton.hopper.rows import (
    LOWEST,
    Outputs,
    first_hidden,
    hide_tokens,
    place_item,
    raise_peak,
    share,
    store_half,
    store_lse,
    weigh,
)
from mla_decode_triton.hopper.storage import (
    key_matrices,
    new_keys,
    new_queries,
    query_matrices,
)
from mla_decode_triton.hopper.walk import (
    HALF,
    TILE,
    Part,
    part_range,
    piece_range,
    signal,
)


@gluon.jit
def store_item(
    outputs,
    acc_left,
    acc_right,
    peak,
    total,
    scale_log2,
    value_scale,
    rows,
    part,
    place,
    ROWS: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store both halves of what an item has become, and its log-sum-exp."""
    base, slot_base, is_split = place
    factor = share(total, value_scale)
    store_lse(
        outputs,
        peak,
        total,
        scale_log2,
        rows,
        part.num_rows,
        base,
        slot_base,
        is_split,
        NEEDS_LSE,
    )
    store_half(
        outputs,
        acc_left,
        factor,
        part,
        base,
        slot_base,
        is_split,
        0,
        ROWS,
        1,
        LAYOUT,
    )
    store_half(
        outputs,
        acc_right,
        factor,
        part,
        base,
        slot_base,
        is_split,
        HALF,
        ROWS,
        1,
        LAYOUT,
    )


@gluon.jit
def consume(
    queries,
    keys,
    weights,
    part,
    outputs,
    kv_scale,
    scale_log2,
    num_heads,
    query_len,
    ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    PIECE: gl.constexpr,
):
    """Score, weigh and multiply every tile; store what an item has become."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PER_ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    value_scale = 1.0
    if kv_scale is not None:
        value_scale = gl.load(kv_scale)
        scale_log2 = scale_log2 * value_scale
    q_left = queries.latent.index(0).permute((1, 0))
    q_right = queries.latent.index(1).permute((1, 0))
    q_end = queries.rope.permute((1, 0))
    rows = part.row0 + gl.arange(0, ROWS, layout=PER_ROW)
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, layout=LAYOUT)
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(part.seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, num_tiles = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            visible, least_visible = first_hidden(
                rows, seq_len, num_heads, query_len, CAUSAL
            )
            peak = gl.full([ROWS], LOWEST, gl.float32, layout=PER_ROW)
            total = gl.full([ROWS], 0.0, gl.float32, layout=PER_ROW)
            acc_left = gl.full([HALF, ROWS], 0.0, gl.float32, layout=LAYOUT)
            acc_right = gl.full([HALF, ROWS], 0.0, gl.float32, layout=LAYOUT)
            mbarrier.wait(queries.full, item & 1)
            for tile in range(first, last):
                stage = step & 1
                parity = (step >> 1) & 1
                left = keys.left.index(stage)
                right = keys.right.index(stage)
                mbarrier.wait(keys.left_full.index(stage), parity)
                scores = warpgroup_mma(
                    keys.rope.index(stage), q_end, zeros, use_acc=False, is_async=True
                )
                scores = warpgroup_mma(left, q_left, scores, is_async=True)
                mbarrier.wait(keys.right_full.index(stage), parity)
                scores = warpgroup_mma(right, q_right, scores, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[scores])
                scores = hide_tokens(
                    scores,
                    visible,
                    least_visible,
                    tile * TILE,
                    seq_len,
                    PIECE,
                    1,
                    LAYOUT,
                )
                peak, decay = raise_peak(scores, peak, scale_log2, 1)
                p = weigh(scores, peak, scale_log2, 1)
                weights.store(p.to(weights.dtype))
                fence_async_shared()
                barrier()
                acc_left = acc_left * decay[None, :]
                acc_right = acc_right * decay[None, :]
                product_left = warpgroup_mma(
                    left.permute((1, 0)), weights, acc_left, is_async=True
                )
                product_right = warpgroup_mma(
                    right.permute((1, 0)), weights, acc_right, is_async=True
                )
                total = total * decay + gl.sum(p, 0)
                acc_left, acc_right = warpgroup_mma_wait(
                    0, deps=[product_left, product_right]
                )
                signal(keys.free.index(stage))
                step += 1
            signal(queries.free)
            store_item(
                outputs,
                acc_left,
                acc_right,
                peak,
                total,
                scale_log2,
                value_scale,
                rows,
                part,
                place_item(part, req, first, last, num_tiles),
                ROWS,
                NEEDS_LSE,
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
    ],
    do_not_specialize_on_alignment=["table", "seq_lens", "lse"],
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
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(ROWS * 2, 16, 2)
    dtype: gl.constexpr = kv.dtype
    queries = new_queries(q_latent, q_rope, dtype, ROWS)
    keys = new_keys(kv, PIECE, 2)
    weights = gl.allocate_shared_memory(dtype, [TILE, ROWS], WEIGHTS)
    fence_async_shared()
    part = Part(
        schedule,
        seq_lens,
        gl.program_id(1),
        num_parts,
        num_reqs,
        query_len * num_heads,
        gl.program_id(0) * ROWS,
    )
    gl.warp_specialize(
        [
            (
                consume,
                (
                    query_matrices(queries, dtype, ROWS),
                    key_matrices(keys, dtype),
                    weights,
                    part,
                    Outputs(out, lse, partial_out, partial_lse),
                    None,
                    scale_log2,
                    num_heads,
                    query_len,
                    ROWS,
                    CAUSAL,
                    NEEDS_LSE,
                    PIECE,
                ),
            ),
            (
                produce,
                (
                    q_latent,
                    q_rope,
                    kv,
                    table,
                    table_stride,
                    num_pages,
                    queries,
                    keys,
                    part,
                    out,
                    lse,
                    ROWS,
                    2,
                    True,
                    NEEDS_LSE,
                    PAGE,
                    PIECE,
                ),
            ),
        ],
        [1],
        [40],
    )
