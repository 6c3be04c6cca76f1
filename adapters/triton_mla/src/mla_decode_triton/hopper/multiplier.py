# mypy: ignore-errors
"""The consumer of many rows that multiplies: it owns output columns 256..511."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_decode_triton.hopper.named_barriers import (
    BETWEEN_CONSUMERS,
    RIGHT_IS_FREE,
    WARPGROUP,
    WEIGHTS,
    give,
    give_both,
    take,
)
from mla_decode_triton.hopper.rows import place_item, share, store_half
from mla_decode_triton.hopper.scorer import ROWS
from mla_decode_triton.hopper.votes import any_positive
from mla_decode_triton.hopper.walk import HALF, part_range, piece_range


@gluon.jit
def multiply(
    keys,
    given,
    part,
    outputs,
    kv_scale,
    BRINGING: gl.constexpr,
    ACC: gl.constexpr,
):
    """Multiply the weights and the right half of every tile; store what that makes.

    BRINGING: threads of the partition that brings tiles.
    """
    value_scale = 1.0
    if kv_scale is not None:
        value_scale = gl.load(kv_scale)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    give_both(RIGHT_IS_FREE, WARPGROUP + BRINGING)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(part.seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, num_tiles = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout=ACC)
            for tile in range(first, last):
                stage = step & 1
                take(WEIGHTS + stage, BETWEEN_CONSUMERS)
                decay = given.decays.index(stage).load(ACC_ROW)
                # Peaks seldom rise after the first tiles: then there is nothing to scale.
                if any_positive(1.0 - decay):
                    acc = acc * decay[:, None]
                product = warpgroup_mma(
                    given.weights.index(stage),
                    keys.right.index(stage),
                    acc,
                    is_async=True,
                )
                acc = warpgroup_mma_wait(0, deps=[product])
                if tile < last - 1:
                    give(RIGHT_IS_FREE + stage, WARPGROUP + BRINGING)
                step += 1
            mbarrier.wait(given.totals_full.index(item & 1), (item >> 1) & 1)
            total = given.totals.index(item & 1).load(ACC_ROW)
            # Only now may the scorer run two tiles ahead: it overwrites the totals.
            give(RIGHT_IS_FREE + ((step - 1) & 1), WARPGROUP + BRINGING)
            base, slot_base, is_split = place_item(part, req, first, last, num_tiles)
            store_half(
                outputs,
                acc,
                share(total, value_scale),
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
