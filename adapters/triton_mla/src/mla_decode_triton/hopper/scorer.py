# mypy: ignore-errors
"""The consumer of many rows that scores: its warpgroup owns output columns 0..255.

It hands the weights to the `multiplier`'s warpgroup in shared memory and multiplies
them from registers itself.
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
from mla_decode_triton.hopper.lazy_peak import no_sums, raise_heavy, thread_sums
from mla_decode_triton.hopper.named_barriers import (
    BETWEEN_CONSUMERS,
    LEFT_IS_FREE,
    WARPGROUP,
    WEIGHTS,
    give,
    give_both,
)
from mla_decode_triton.hopper.rows import (
    LOWEST,
    first_hidden,
    hide_tokens,
    place_item,
    share,
    store_half,
    store_lse,
    weigh,
)
from mla_decode_triton.hopper.walk import (
    HALF,
    TILE,
    part_range,
    piece_range,
    signal,
)

ROWS = gl.constexpr(64)


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
def _hand_over(given, decay, operand, stage):
    """Give the other warpgroup the weights of a tile, and what to scale by before."""
    # Weights overwrite what products of all warps must have read.
    barrier()
    given.decays.index(stage).store(decay)
    given.weights.index(stage).store(operand)
    fence_async_shared()
    give(WEIGHTS + stage, BETWEEN_CONSUMERS)


@gluon.jit
def _issue_values(acc, operand, values, ACC: gl.constexpr):
    """Start the product of weights in registers and half of a tile."""
    operand = gl.convert_layout(operand, gl.DotOperandLayout(0, ACC, 2))
    return warpgroup_mma(operand, values, acc, is_async=True)


@gluon.jit
def score(
    queries,
    keys,
    given,
    part,
    outputs,
    kv_scale,
    scale_log2,
    num_heads,
    query_len,
    CAUSAL: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    PIECE: gl.constexpr,
    BRINGING: gl.constexpr,
    SCORES: gl.constexpr,
    ACC: gl.constexpr,
):
    """Score every tile, weigh it, and multiply its left half; store what that makes.

    BRINGING: threads of the partition that brings tiles.
    """
    PER_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    value_scale = 1.0
    if kv_scale is not None:
        value_scale = gl.load(kv_scale)
        scale_log2 = scale_log2 * value_scale
    rows = part.row0 + gl.arange(0, ROWS, layout=PER_ROW)
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    give_both(LEFT_IS_FREE, WARPGROUP + BRINGING)
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
            sums = no_sums()
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout=ACC)
            mbarrier.wait(queries.full, item & 1)
            for tile in range(first, last):
                stage = step & 1
                scores = _issue_scores(queries, keys, step, SCORES)
                scores = warpgroup_mma_wait(0, deps=[scores])
                if tile == last - 1:
                    signal(queries.free)
                scores = hide_tokens(
                    scores,
                    visible,
                    least_visible,
                    tile * TILE,
                    seq_len,
                    PIECE,
                    0,
                    SCORES,
                )
                peak, decay, sums, acc = raise_heavy(
                    scores, peak, sums, acc, scale_log2, SCORES, ACC
                )
                p = weigh(scores, peak, scale_log2, 0)
                operand = p.to(given.weights.dtype)
                sums += thread_sums(p)
                _hand_over(given, decay, operand, stage)
                product = _issue_values(acc, operand, keys.left.index(stage), ACC)
                acc = warpgroup_mma_wait(0, deps=[product])
                give(LEFT_IS_FREE + stage, WARPGROUP + BRINGING)
                step += 1
            total = gl.convert_layout(gl.sum(sums, 1), PER_ROW)
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
            factor = share(
                gl.convert_layout(total, gl.SliceLayout(1, ACC)), value_scale
            )
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
