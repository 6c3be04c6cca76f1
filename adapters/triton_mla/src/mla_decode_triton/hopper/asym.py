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

from mla_decode_triton.hopper.compat import aggregate, barrier
from mla_decode_triton.hopper.copying import produce
from mla_decode_triton.hopper.rows import (
    LOWEST,
    Outputs,
    first_hidden,
    hide_tokens,
    place_item,
    share,
    soften,
    store_half,
    store_lse,
)
from mla_decode_triton.hopper.storage import (
    key_matrices,
    new_barriers,
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

ROWS = gl.constexpr(64)


@aggregate
class Handover:
    """What the scorer gives the multiplier: of each tile, and of each item its sums."""

    decays: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    """In the bytes of the tile's rope part, which has been used by then."""
    weights_full: gl.shared_memory_descriptor
    totals: gl.shared_memory_descriptor
    totals_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, decays, weights, weights_full, totals, totals_full) -> None:
        self.decays = decays
        self.weights = weights
        self.weights_full = weights_full
        self.totals = totals
        self.totals_full = totals_full


@gluon.jit
def _issue_scores(queries, keys, step, SCORES: gl.constexpr):
    """Start the scores of a tile as its halves arrive."""
    stage = step & 1
    parity = (step >> 1) & 1
    zeros = gl.full([ROWS, TILE], 0.0, gl.float32, layout=SCORES)
    left = keys.left.index(stage).permute((1, 0))
    right = keys.right.index(stage).permute((1, 0))
    rope = keys.rope.index(stage).permute((1, 0))
    mbarrier.wait(keys.left_full.index(stage), parity)
    scores = warpgroup_mma(
        queries.latent.index(0), left, zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(keys.right_full.index(stage), parity)
    scores = warpgroup_mma(queries.latent.index(1), right, scores, is_async=True)
    return warpgroup_mma(queries.rope, rope, scores, is_async=True)


@gluon.jit
def _weigh(
    scores,
    peak,
    total,
    visible,
    least_visible,
    tile,
    seq_len,
    scale_log2,
    given,
    stage,
    PIECE: gl.constexpr,
    SCORES: gl.constexpr,
):
    """One online-softmax step; hands the weights to the other warpgroup."""
    scores = hide_tokens(
        scores, visible, least_visible, tile * TILE, seq_len, PIECE, 0, SCORES
    )
    peak, decay, p = soften(scores, peak, scale_log2, 0)
    operand = p.to(given.weights.dtype)
    # The weights overwrite what the products of other warps may still read.
    barrier()
    given.decays.index(stage).store(decay)
    given.weights.index(stage).store(operand)
    fence_async_shared()
    signal(given.weights_full.index(stage))
    return peak, total * decay + gl.sum(p, 1), decay, operand


@gluon.jit
def _issue_values(acc, decay, operand, values, ACC: gl.constexpr):
    """Start the product of weights in registers and half of a tile."""
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, ACC))[:, None]
    operand = gl.convert_layout(operand, gl.DotOperandLayout(0, ACC, 2))
    return warpgroup_mma(operand, values, acc, is_async=True)


@gluon.jit
def _score(
    queries,
    keys,
    given,
    part,
    outputs,
    scale_log2,
    num_heads,
    query_len,
    CAUSAL: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    AHEAD: gl.constexpr,
    PIECE: gl.constexpr,
    SCORES: gl.constexpr,
    ACC: gl.constexpr,
):
    PER_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    rows = part.row0 + gl.arange(0, ROWS, layout=PER_ROW)
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
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout=ACC)
            mbarrier.wait(queries.full, item & 1)
            if AHEAD:
                scores = _issue_scores(queries, keys, step, SCORES)
                scores = warpgroup_mma_wait(0, deps=[scores])
                for tile in range(first, last - 1):
                    stage = step & 1
                    peak, total, decay, operand = _weigh(
                        scores,
                        peak,
                        total,
                        visible,
                        least_visible,
                        tile,
                        seq_len,
                        scale_log2,
                        given,
                        stage,
                        PIECE,
                        SCORES,
                    )
                    product = _issue_values(
                        acc, decay, operand, keys.left.index(stage), ACC
                    )
                    coming = _issue_scores(queries, keys, step + 1, SCORES)
                    acc = warpgroup_mma_wait(3, deps=[product])
                    signal(keys.left_free.index(stage))
                    scores = warpgroup_mma_wait(0, deps=[coming])
                    step += 1
                signal(queries.free)
                stage = step & 1
                peak, total, decay, operand = _weigh(
                    scores,
                    peak,
                    total,
                    visible,
                    least_visible,
                    last - 1,
                    seq_len,
                    scale_log2,
                    given,
                    stage,
                    PIECE,
                    SCORES,
                )
                product = _issue_values(
                    acc, decay, operand, keys.left.index(stage), ACC
                )
                acc = warpgroup_mma_wait(0, deps=[product])
                signal(keys.left_free.index(stage))
                step += 1
            else:
                for tile in range(first, last):
                    stage = step & 1
                    scores = _issue_scores(queries, keys, step, SCORES)
                    scores = warpgroup_mma_wait(0, deps=[scores])
                    if tile == last - 1:
                        signal(queries.free)
                    peak, total, decay, operand = _weigh(
                        scores,
                        peak,
                        total,
                        visible,
                        least_visible,
                        tile,
                        seq_len,
                        scale_log2,
                        given,
                        stage,
                        PIECE,
                        SCORES,
                    )
                    product = _issue_values(
                        acc, decay, operand, keys.left.index(stage), ACC
                    )
                    acc = warpgroup_mma_wait(0, deps=[product])
                    signal(keys.left_free.index(stage))
                    step += 1
            given.totals.index(item & 1).store(total)
            signal(given.totals_full.index(item & 1))
            base, slot_base, is_split = place_item(part, req, first, last, num_tiles)
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
            factor = share(gl.convert_layout(total, gl.SliceLayout(1, ACC)), 1.0)
            store_half(
                outputs,
                acc,
                factor,
                part,
                base,
                slot_base,
                is_split,
                0,
                ROWS,
                0,
                ACC,
            )
            item += 1
        seq_len = next_len


@gluon.jit
def _multiply(keys, given, part, outputs, ACC: gl.constexpr):
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(part.seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, num_tiles = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout=ACC)
            for tile in range(first, last):
                stage = step & 1
                mbarrier.wait(given.weights_full.index(stage), (step >> 1) & 1)
                decay = given.decays.index(stage).load(ACC_ROW)
                acc = acc * decay[:, None]
                product = warpgroup_mma(
                    given.weights.index(stage),
                    keys.right.index(stage),
                    acc,
                    is_async=True,
                )
                acc = warpgroup_mma_wait(0, deps=[product])
                if tile < last - 1:
                    signal(keys.right_free.index(stage))
                step += 1
            mbarrier.wait(given.totals_full.index(item & 1), (item >> 1) & 1)
            total = given.totals.index(item & 1).load(ACC_ROW)
            # Only now may the scorer run two tiles ahead: it overwrites the totals.
            signal(keys.right_free.index((step - 1) & 1))
            base, slot_base, is_split = place_item(part, req, first, last, num_tiles)
            store_half(
                outputs,
                acc,
                share(total, 1.0),
                part,
                base,
                slot_base,
                is_split,
                HALF,
                ROWS,
                0,
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
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = kv.dtype
    queries = new_queries(q_latent, q_rope, dtype, ROWS)
    boxes = new_keys(kv, PIECE, 2, False)
    keys = key_matrices(boxes, dtype)
    given = Handover(
        gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR),
        keys.rope,
        new_barriers(2),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR),
        new_barriers(2),
    )
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
    outputs = Outputs(out, lse, partial_out, partial_lse)
    gl.warp_specialize(
        [
            (
                _score,
                (
                    query_matrices(queries, dtype, ROWS),
                    keys,
                    given,
                    part,
                    outputs,
                    scale_log2,
                    num_heads,
                    query_len,
                    CAUSAL,
                    NEEDS_LSE,
                    AHEAD,
                    PIECE,
                    SCORES,
                    ACC,
                ),
            ),
            (_multiply, (keys, given, part, outputs, ACC)),
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
                    boxes,
                    part,
                    out,
                    lse,
                    ROWS,
                    2,
                    False,
                    False,
                    NEEDS_LSE,
                    PAGE,
                    PIECE,
                ),
            ),
        ],
        [4, 1],
        [200, 48],
    )
