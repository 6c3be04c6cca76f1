# mypy: ignore-errors
"""The warpgroups that score tiles of an fp8 cache, and widen them for what follows.

Each has a half of every tile. The half passes its registers once: loaded as codes, made
the query's type, multiplied by the queries from where it is, and written for the product
with the weights. So the scores cost no shared memory that is read.

A thread loads 16 neighbouring columns, and the matrix unit takes columns from four
threads in turn. It is given them in an order of its own (`in_fragment_order`) which the
queries are brought into as well, once for each item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_decode_triton.hopper.compat import aggregate
from mla_decode_triton.hopper.storage import new_barriers
from mla_decode_triton.hopper.walk import (
    HALF,
    TILE,
    part_range,
    piece_range,
    signal,
)
from mla_decode_triton.hopper.widening import copied, widened


@aggregate
class Scores:
    """Scores of a tile, what each half adds to them; `full` takes two arrivals."""

    halves: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, halves, full, free) -> None:
        self.halves = halves
        self.full = full
        self.free = free


@aggregate
class Values:
    """Widened halves of tiles, two left ones and one right one; barriers as of `Keys`.

    What frees the left ones is that scores are taken, see `score_half`.
    """

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor
    right_free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, left, right, left_full, right_full, right_free) -> None:
        self.left = left
        self.right = right
        self.left_full = left_full
        self.right_full = right_full
        self.right_free = right_free


@gluon.jit
def new_scores(ROWS: gl.constexpr):
    """Memory for the scores of one tile."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 32 // ROWS, ROWS // 8, [1, 0])
    return Scores(
        gl.allocate_shared_memory(gl.float32, [2, TILE, ROWS], LAYOUT),
        new_barriers(1, 2).index(0),
        new_barriers(1).index(0),
    )


@gluon.jit
def new_values(dtype: gl.constexpr):
    """Memory for three halves in the query's type."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return Values(
        gl.allocate_shared_memory(dtype, [2, TILE, HALF], MATRIX),
        gl.allocate_shared_memory(dtype, [1, TILE, HALF], MATRIX),
        new_barriers(2),
        new_barriers(1),
        new_barriers(1),
    )


@gluon.jit
def in_fragment_order(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns in the order in which the matrix unit takes a thread's 16 neighbours.

    Thread t of four holds columns 16 t to 16 t + 15 of every 64, and gives four to each
    product: a pair to each of its halves.
    """
    x = gl.reshape(x, [ROWS, COLUMNS // 64, 4, 4, 2, 2])
    x = gl.permute(x, [0, 1, 3, 4, 2, 5])
    return gl.reshape(x, [ROWS, COLUMNS])


@gluon.jit
def _order_columns(q, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Bring queries into the order of a tile's fragments, in place."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [2, 2], [1, 0])
    q.store(in_fragment_order(q.load(LAYOUT), ROWS, COLUMNS))


@gluon.jit
def _fragments(values, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """Values as an operand of the matrix unit, in the registers where they are."""
    ordered = in_fragment_order(values, TILE, COLUMNS)
    return gl.convert_layout(ordered, gl.DotOperandLayout(0, SCORES, 2))


@gluon.jit
def score_half(
    queries,
    narrow,
    scores,
    added_scores,
    values,
    part,
    ROWS: gl.constexpr,
    IS_LEFT: gl.constexpr,
):
    """Score one half of every tile and write it in the query's type, as there is room.

    The rope part belongs to the left half. The scores of a tile are taken when the left
    half of the tile before the last one has been used, so that its place is free.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LANES: gl.constexpr = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    WARPS: gl.constexpr = [[16, 0], [32, 0]]
    GROUP: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], LANES, WARPS, [], [TILE, 64]
    )
    GROUPS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 64], [0, 128]],
        LANES,
        WARPS,
        [],
        [TILE, HALF],
    )
    dtype: gl.constexpr = values.left.dtype
    q_left = queries.latent.index(0)
    q_right = queries.latent.index(1)
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, layout=SCORES)
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(part.seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, _ = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            mbarrier.wait(queries.full, item & 1)
            if IS_LEFT:
                _order_columns(queries.rope, ROWS, 64)
                _order_columns(q_left, ROWS, HALF)
            else:
                _order_columns(q_right, ROWS, HALF)
            fence_async_shared()  # of all threads when the first tile is taken over
            for tile in range(first, last):
                stage = step & 1
                parity = (step >> 1) & 1
                if IS_LEFT:
                    mbarrier.wait(narrow.left_full.index(stage), parity)
                    codes = narrow.left.index(stage).load(GROUPS)
                    rope_codes = narrow.rope.index(stage).load(GROUP)
                    signal(narrow.left_free.index(stage))
                    rope = _fragments(widened(rope_codes, dtype), 64, SCORES)
                    product = warpgroup_mma(
                        rope,
                        queries.rope.permute((1, 0)),
                        zeros,
                        use_acc=False,
                        is_async=True,
                    )
                    half = widened(codes, dtype)
                    product = warpgroup_mma(
                        _fragments(half, HALF, SCORES),
                        q_left.permute((1, 0)),
                        product,
                        is_async=True,
                    )
                else:
                    mbarrier.wait(narrow.right_full.index(stage), parity)
                    codes = narrow.right.index(stage).load(GROUPS)
                    signal(narrow.right_free.index(stage))
                    half = widened(codes, dtype)
                    product = warpgroup_mma(
                        _fragments(half, HALF, SCORES),
                        q_right.permute((1, 0)),
                        zeros,
                        use_acc=False,
                        is_async=True,
                    )
                added = warpgroup_mma_wait(0, deps=[product])
                # A store wants other registers than a product, and both do not fit.
                half = copied(half, tile >> 26, dtype)
                mbarrier.wait(scores.free, (step & 1) ^ 1)
                added_scores.store(added)
                signal(scores.full)
                if IS_LEFT:
                    values.left.index(stage).store(half)
                    fence_async_shared()
                    signal(values.left_full.index(stage))
                else:
                    mbarrier.wait(values.right_free.index(0), (step & 1) ^ 1)
                    values.right.index(0).store(half)
                    fence_async_shared()
                    signal(values.right_full.index(0))
                step += 1
            signal(queries.free)
            item += 1
        seq_len = next_len
