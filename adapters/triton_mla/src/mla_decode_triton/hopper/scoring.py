# mypy: ignore-errors
"""The two warpgroups that score tiles of an fp8 cache for few rows; one weighs them.

Each has a half of every tile, the right one the rope part too. A half passes its
registers: loaded as codes, made bf16, and multiplied by the queries from where it is.
The right one's scores are added to the left one's, which hands the weights on.

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

from mla_decode_triton.hopper.compat import aggregate, barrier
from mla_decode_triton.hopper.rows import (
    LOWEST,
    first_hidden,
    hide_tokens,
    place_item,
    raise_peak,
    store_lse,
    weigh,
)
from mla_decode_triton.hopper.storage import new_barriers
from mla_decode_triton.hopper.walk import TILE, part_range, piece_range, signal
from mla_decode_triton.hopper.widening import UNIT, lifted, widened_low

STAGES = gl.constexpr(4)
QUERY_UNIT = gl.constexpr(2.0**64)
"""What queries are multiplied by: beside values of 2**-120 scores stay normal numbers."""
CODE_BASES = gl.constexpr([[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]])
"""A thread's codes of 64 columns of a tile: 16 neighbours, of two tokens."""
WIDE_BASES = gl.constexpr([[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 64]])


@aggregate
class Weighed:
    """What is made of each stage's tile.

    Who has it knows that both scorers are done with the tile: it alone frees the stage,
    and this with it.
    """

    weights: gl.shared_memory_descriptor
    decays: gl.shared_memory_descriptor
    totals: gl.shared_memory_descriptor
    """Of an item, beside its last tile."""
    full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, weights, decays, totals, full) -> None:
        self.weights = weights
        self.decays = decays
        self.totals = totals
        self.full = full


@aggregate
class Added:
    """Scores of right halves, of two tiles at a time."""

    scores: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, scores, full, free) -> None:
        self.scores = scores
        self.full = full
        self.free = free


@gluon.jit
def new_weighed(dtype: gl.constexpr, ROWS: gl.constexpr):
    """Memory for what is made of every stage."""
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(ROWS * 2, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Weighed(
        gl.allocate_shared_memory(dtype, [STAGES, TILE, ROWS], WEIGHTS),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], VECTOR),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], VECTOR),
        new_barriers(STAGES),
    )


@gluon.jit
def new_added(ROWS: gl.constexpr):
    """Memory for the scores of right halves."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 32 // ROWS, ROWS // 8, [1, 0])
    return Added(
        gl.allocate_shared_memory(gl.float32, [2, TILE, ROWS], LAYOUT),
        new_barriers(2),
        new_barriers(2),
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
    """Bring queries into the order and the unit of a tile's fragments, in place."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [2, 2], [1, 0])
    raised = (q.load(LAYOUT).to(gl.float32) * QUERY_UNIT).to(q.dtype)
    q.store(in_fragment_order(raised, ROWS, COLUMNS))


@gluon.jit
def _issue_scores(
    matrix,
    queries,
    acc,
    COLUMNS: gl.constexpr,
    ADDS: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Start the scores of 64 or 128 columns of a tile."""
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        CODE_BASES if COLUMNS == 64 else WIDE_BASES,
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [TILE, COLUMNS],
    )
    values = in_fragment_order(widened_low(matrix.load(CODES)), TILE, COLUMNS)
    return warpgroup_mma(
        gl.convert_layout(values, gl.DotOperandLayout(0, SCORES, 2)),
        queries.permute((1, 0)),
        acc,
        use_acc=ADDS,
        is_async=True,
    )


@gluon.jit
def score_right(queries, keys, added, part, ROWS: gl.constexpr):
    """Score the right half of every tile, and the rope part."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, layout=SCORES)
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(part.seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, _ = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            mbarrier.wait(queries.full, item & 1)
            _order_columns(queries.rope, ROWS, 64)
            _order_columns(queries.latent.index(2), ROWS, 128)
            _order_columns(queries.latent.index(3), ROWS, 128)
            fence_async_shared()
            barrier()
            for _tile in range(first, last):
                stage = step & (STAGES - 1)
                mbarrier.wait(keys.right_full.index(stage), (step // STAGES) & 1)
                product = _issue_scores(
                    keys.rope.index(stage), queries.rope, zeros, 64, False, SCORES
                )
                for group in gl.static_range(2):
                    product = _issue_scores(
                        keys.right.index(stage * 2 + group),
                        queries.latent.index(2 + group),
                        product,
                        128,
                        True,
                        SCORES,
                    )
                scores = warpgroup_mma_wait(0, deps=[product])
                mbarrier.wait(added.free.index(step & 1), ((step >> 1) & 1) ^ 1)
                added.scores.index(step & 1).store(scores)
                signal(added.full.index(step & 1))
                step += 1
            signal(queries.free)
            item += 1
        seq_len = next_len


@gluon.jit
def _score(queries, keys, added, step, ROWS: gl.constexpr, SCORES: gl.constexpr):
    """Scores of a tile, [64, rows]."""
    stage = step & (STAGES - 1)
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, layout=SCORES)
    mbarrier.wait(keys.left_full.index(stage), (step // STAGES) & 1)
    product = zeros
    for group in gl.static_range(2):
        product = _issue_scores(
            keys.left.index(stage * 2 + group),
            queries.latent.index(group),
            product,
            128,
            group > 0,
            SCORES,
        )
    mbarrier.wait(added.full.index(step & 1), (step >> 1) & 1)
    right_scores = added.scores.index(step & 1).load(SCORES)
    signal(added.free.index(step & 1))
    scores = warpgroup_mma_wait(0, deps=[product])
    return (scores + right_scores) * (1.0 / (UNIT * QUERY_UNIT))


@gluon.jit
def score_left(
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
    ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    PIECE: gl.constexpr,
):
    """Score the left half of every tile and weigh it; store log-sum-exps."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PER_ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    scale_log2 = scale_log2 * gl.load(kv_scale)
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
            # Of each token of a tile: added up across threads once an item.
            totals = gl.full([TILE, ROWS], 0.0, gl.float32, layout=SCORES)
            mbarrier.wait(queries.full, item & 1)
            _order_columns(queries.latent.index(0), ROWS, 128)
            _order_columns(queries.latent.index(1), ROWS, 128)
            fence_async_shared()
            barrier()
            for tile in range(first, last):
                stage = step & (STAGES - 1)
                scores = hide_tokens(
                    _score(queries, keys, added, step, ROWS, SCORES),
                    visible,
                    least_visible,
                    tile * TILE,
                    seq_len,
                    PIECE,
                    1,
                    SCORES,
                )
                peak, decay = raise_peak(scores, peak, scale_log2, 1)
                weighed.decays.index(stage).store(decay)
                p = weigh(scores, peak, scale_log2, 1)
                totals = totals * decay[None, :] + p
                weighed.weights.index(stage).store(lifted(p))
                if tile == last - 1:
                    weighed.totals.index(stage).store(gl.sum(totals, 0))
                fence_async_shared()
                signal(weighed.full.index(stage))
                step += 1
            signal(queries.free)
            total = gl.sum(totals, 0)
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
            item += 1
        seq_len = next_len
