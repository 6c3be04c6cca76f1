# mypy: ignore-errors
"""The variant for few rows over an fp8 cache: operands swapped, three warpgroups.

As `swap`, but a tile arrives as fp8, and two warpgroups (`scoring`) score it and write it
in the query's type for a third, which weighs and multiplies. See `docs/hopper.md`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_decode_triton.hopper.compat import barrier, reinterpret
from mla_decode_triton.hopper.copying import produce
from mla_decode_triton.hopper.rows import (
    LOWEST,
    Outputs,
    first_hidden,
    hide_tokens,
    place_item,
    raise_peak,
    weigh,
)
from mla_decode_triton.hopper.scoring import new_scores, new_values, score_half
from mla_decode_triton.hopper.storage import (
    Keys,
    new_keys,
    new_queries,
    query_matrices,
)
from mla_decode_triton.hopper.swap import store_item
from mla_decode_triton.hopper.walk import (
    HALF,
    TILE,
    Part,
    part_range,
    piece_range,
    signal,
)


@gluon.jit
def _weigh(
    scores,
    values,
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
    """Weigh and multiply every tile; store what an item has become."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PER_ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    value_scale = gl.load(kv_scale)
    scale_log2 = scale_log2 * value_scale
    rows = part.row0 + gl.arange(0, ROWS, layout=PER_ROW)
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    step = 0
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
            for tile in range(first, last):
                stage = step & 1
                mbarrier.wait(scores.full, step & 1)
                left_scores = scores.halves.index(0).load(LAYOUT)
                right_scores = scores.halves.index(1).load(LAYOUT)
                signal(scores.free)
                summed = hide_tokens(
                    left_scores + right_scores,
                    visible,
                    least_visible,
                    tile * TILE,
                    seq_len,
                    PIECE,
                    1,
                    LAYOUT,
                )
                peak, decay = raise_peak(summed, peak, scale_log2, 1)
                p = weigh(summed, peak, scale_log2, 1)
                weights.store(p.to(weights.dtype))
                fence_async_shared()
                barrier()
                acc_left = acc_left * decay[None, :]
                acc_right = acc_right * decay[None, :]
                # 0 that is no constant: one would keep its addresses in registers.
                right = values.right.index(tile >> 26)
                mbarrier.wait(values.right_full.index(0), step & 1)
                product_right = warpgroup_mma(
                    right.permute((1, 0)), weights, acc_right, is_async=True
                )
                left = values.left.index(stage)
                mbarrier.wait(values.left_full.index(stage), (step >> 1) & 1)
                product_left = warpgroup_mma(
                    left.permute((1, 0)), weights, acc_left, is_async=True
                )
                total = total * decay + gl.sum(p, 0)
                acc_right = warpgroup_mma_wait(1, deps=[product_right])
                signal(values.right_free.index(0))
                acc_left = warpgroup_mma_wait(0, deps=[product_left])
                step += 1
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
        seq_len = next_len


@gluon.jit
def _narrow_matrices(keys, dtype: gl.constexpr):
    """Two fp8 tiles as [2, 64, 256] twice and [2, 64, 64]."""
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    return Keys(
        reinterpret(keys.left, dtype, [2, TILE, HALF], NARROW),
        reinterpret(keys.right, dtype, [2, TILE, HALF], NARROW),
        reinterpret(keys.rope, dtype, [2, TILE, 64], NARROW),
        keys.left_full,
        keys.right_full,
        keys.left_free,
        keys.right_free,
    )


@gluon.jit(
    do_not_specialize=[
        "num_heads",
        "query_len",
        "table_stride",
        "num_pages",
        "num_reqs",
        "num_parts",
    ],
    do_not_specialize_on_alignment=["table", "seq_lens", "lse", "kv_scale"],
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
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(ROWS * 2, 16, 2)
    REGISTERS: gl.constexpr = [160, 152, 40] if ROWS == 16 else [144, 120, 40]
    dtype: gl.constexpr = q_latent.dtype
    boxes = new_queries(q_latent, q_rope, dtype, ROWS, 2)
    raw = new_keys(kv, PIECE, 2, False)
    scores = new_scores(ROWS)
    values = new_values(dtype)
    weights = gl.allocate_shared_memory(dtype, [TILE, ROWS], WEIGHTS)
    fence_async_shared()
    queries = query_matrices(boxes, dtype, ROWS)
    narrow = _narrow_matrices(raw, kv.dtype)
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
                _weigh,
                (
                    scores,
                    values,
                    weights,
                    part,
                    Outputs(out, lse, partial_out, partial_lse),
                    kv_scale,
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
                score_half,
                (
                    queries,
                    narrow,
                    scores,
                    scores.halves.index(0),
                    values,
                    part,
                    ROWS,
                    True,
                ),
            ),
            (
                score_half,
                (
                    queries,
                    narrow,
                    scores,
                    scores.halves.index(1),
                    values,
                    part,
                    ROWS,
                    False,
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
                    boxes,
                    raw,
                    part,
                    out,
                    lse,
                    ROWS,
                    2,
                    True,
                    False,
                    NEEDS_LSE,
                    PAGE,
                    PIECE,
                ),
            ),
        ],
        [4, 4, 1],
        REGISTERS,
    )
