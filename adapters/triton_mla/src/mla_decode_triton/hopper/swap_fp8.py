# mypy: ignore-errors
"""The variant for few rows over an fp8 cache: operands swapped, three warpgroups.

Two score every tile, a half each, and weigh it (`scoring`); one multiplies weights and
values. Each widens what it multiplies, in registers on their way to the matrix unit. See
`docs/hopper.md`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_decode_triton.hopper.compat import reinterpret
from mla_decode_triton.hopper.copying import produce
from mla_decode_triton.hopper.rows import Outputs, place_item, share, store_columns
from mla_decode_triton.hopper.scoring import (
    STAGES,
    new_added,
    new_weighed,
    score_left,
    score_right,
)
from mla_decode_triton.hopper.storage import (
    Keys,
    Queries,
    new_keys,
    new_queries,
)
from mla_decode_triton.hopper.walk import (
    TILE,
    Part,
    part_range,
    piece_range,
    signal,
)
from mla_decode_triton.hopper.widening import widened_one


def _columns(row_bases: list[list[int]], rows: int) -> gl.DistributedLinearLayout:
    """128 columns by rows, as an accumulator's even and odd ones come together."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [0, 1], [16, 0], *row_bases],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[32, 0], [64, 0]],
        block_bases=[],
        shape=[128, rows],
    )


COLUMNS_16 = gl.constexpr(_columns([[0, 8]], 16))
COLUMNS_32 = gl.constexpr(_columns([[0, 8], [0, 16]], 32))


@gluon.jit
def _scaled(parts, factor):
    """Each of eight accumulators times a factor."""
    scaled = ()
    for eighth in gl.static_range(8):
        scaled = scaled + (parts[eighth] * factor,)  # noqa: RUF005 - Triton has no unpacking
    return scaled


@gluon.jit
def _finished(products, COUNT: gl.constexpr):
    """Wait for products, one or two."""
    if COUNT == 1:
        results = (warpgroup_mma_wait(0, deps=[products[0]]),)
    else:
        results = warpgroup_mma_wait(0, deps=[products[0], products[1]])
    return results


@gluon.jit
def _multiply(
    left,
    right,
    keys,
    weighed,
    part,
    outputs,
    kv_scale,
    ROWS: gl.constexpr,
):
    """Multiply the weights and every tile, 128 columns at a time; store what that makes.

    Even and odd columns have accumulators of their own, [64, rows] each.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    FRAGMENTS: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    PER_ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    COLUMNS: gl.constexpr = COLUMNS_16 if ROWS == 16 else COLUMNS_32
    # With 32 rows there are no registers for the values of two products.
    AT_ONCE: gl.constexpr = 2 if ROWS == 16 else 1
    value_scale = gl.load(kv_scale)
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, layout=LAYOUT)
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    step = 0
    for req in range(req0, stop):
        next_len = gl.load(part.seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, num_tiles = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            acc = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
            for tile in range(first, last):
                stage = step & (STAGES - 1)
                parity = (step // STAGES) & 1
                weights = weighed.weights.index(stage)
                done = ()
                products = ()
                mbarrier.wait(keys.left_full.index(stage), parity)
                for eighth in gl.static_range(8):
                    if eighth == 4:
                        mbarrier.wait(keys.right_full.index(stage), parity)
                    if eighth % 2 == 0:
                        if eighth < 4:
                            pairs = left.index(stage * 2 + eighth // 2)
                        else:
                            pairs = right.index(stage * 2 + eighth // 2 - 2)
                        codes = pairs.permute((1, 0)).load(FRAGMENTS)
                    values = widened_one(codes, eighth % 2)
                    if eighth == 0:
                        mbarrier.wait(weighed.full.index(stage), parity)
                        decay = weighed.decays.index(stage).load(PER_ROW)
                        # No peak rises in most tiles: then there is nothing to scale.
                        if gl.min(decay, 0) < 1.0:
                            acc = _scaled(acc, decay[None, :])
                    elif eighth % AT_ONCE == 0:
                        done = done + _finished(products, AT_ONCE)
                        products = ()
                    product = warpgroup_mma(values, weights, acc[eighth], is_async=True)
                    products = products + (product,)  # noqa: RUF005 - as above
                acc = done + _finished(products, AT_ONCE)
                if tile < last - 1:
                    signal(keys.free.index(stage))
                step += 1
            stage = (step - 1) & (STAGES - 1)
            total = weighed.totals.index(stage).load(PER_ROW)
            # Only now may the scorer have the stage: it overwrites the totals.
            signal(keys.free.index(stage))
            base, slot_base, is_split = place_item(part, req, first, last, num_tiles)
            factor = share(total, value_scale)[None, :]
            for group in gl.static_range(4):
                columns = gl.join(acc[2 * group] * factor, acc[2 * group + 1] * factor)
                columns = gl.reshape(gl.permute(columns, [0, 2, 1]), [128, ROWS])
                store_columns(
                    outputs,
                    gl.convert_layout(columns, COLUMNS),
                    part,
                    base,
                    slot_base,
                    is_split,
                    group * 128,
                    ROWS,
                    1,
                    COLUMNS,
                )
        seq_len = next_len


@gluon.jit
def _matrices(keys, dtype: gl.constexpr):
    """Stages of fp8 tiles as [2 * STAGES, 64, 128] twice and [STAGES, 64, 64]."""
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    return Keys(
        reinterpret(keys.left, dtype, [2 * STAGES, TILE, 128], NARROW),
        reinterpret(keys.right, dtype, [2 * STAGES, TILE, 128], NARROW),
        reinterpret(keys.rope, dtype, [STAGES, TILE, 64], NARROW),
        keys.left_full,
        keys.right_full,
        keys.free,
    )


@gluon.jit
def _pairs(half):
    """A half of every stage as pairs of codes: [2 * STAGES, 64, 64]."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    return reinterpret(half, gl.int16, [2 * STAGES, TILE, 64], PAIRS)


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
    REGISTERS: gl.constexpr = [152, 160, 40] if ROWS == 16 else [152, 128, 40]
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q_latent.dtype
    boxes = new_queries(q_latent, q_rope, dtype, ROWS, 2)
    raw = new_keys(kv, PIECE, STAGES)
    weighed = new_weighed(dtype, ROWS)
    added = new_added(ROWS)
    fence_async_shared()
    queries = Queries(
        reinterpret(boxes.latent, dtype, [4, ROWS, 128], MATRIX),
        reinterpret(boxes.rope, dtype, [ROWS, 64], MATRIX),
        boxes.full,
        boxes.free,
    )
    keys = _matrices(raw, kv.dtype)
    outputs = Outputs(out, lse, partial_out, partial_lse)
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
                _multiply,
                (
                    _pairs(raw.left),
                    _pairs(raw.right),
                    raw,
                    weighed,
                    part,
                    outputs,
                    kv_scale,
                    ROWS,
                ),
            ),
            (
                score_left,
                (
                    queries,
                    keys,
                    added,
                    weighed,
                    part,
                    outputs,
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
            (score_right, (queries, keys, added, part, ROWS)),
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
                    STAGES,
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
