# mypy: ignore-errors
"""Shared memory of a program: queries and stages of keys, and the barriers of each.

64 columns of a 16-bit type are one 128-byte swizzle row. Memory is allocated as the
boxes that the copy engine fills, [boxes, 1, rows, 64], and read as matrices, which are
the same bytes: the boxes of a column group stacked over each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_decode_triton.hopper.compat import aggregate, reinterpret
from mla_decode_triton.hopper.walk import HALF, TILE


@aggregate
class Queries:
    """Boxes of one request's queries; `full` when they are there, `free` after use."""

    latent: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, latent, rope, full, free) -> None:
        self.latent = latent
        self.rope = rope
        self.full = full
        self.free = free


@aggregate
class Keys:
    """Stages of tiles: latent columns 0..255, 256..511, the rope, and barriers.

    `free` frees a whole stage; where named barriers free halves, nobody looks at it.
    """

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, left, right, rope, left_full, right_full, free) -> None:
        self.left = left
        self.right = right
        self.rope = rope
        self.left_full = left_full
        self.right_full = right_full
        self.free = free


@aggregate
class Handover:
    """What the scorer gives the multiplier: of each tile, and of each item its sums."""

    decays: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    """In the bytes of the tile's rope part, which has been used by then."""
    totals: gl.shared_memory_descriptor
    totals_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, decays, weights, totals, totals_full) -> None:
        self.decays = decays
        self.weights = weights
        self.totals = totals
        self.totals_full = totals_full


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """`COUNT` barriers of so many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def new_queries(
    q_latent,
    q_rope,
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    READERS: gl.constexpr = 1,
):
    """Memory for the queries that two descriptors bring, for so many partitions."""
    latent = gl.allocate_shared_memory(dtype, [8, 1, ROWS, 64], q_latent.layout)
    rope = gl.allocate_shared_memory(dtype, [1, 1, ROWS, 64], q_rope.layout)
    full = new_barriers(1)
    free = new_barriers(1, READERS)
    return Queries(latent, rope, full.index(0), free.index(0))


@gluon.jit
def query_matrices(queries, dtype: gl.constexpr, ROWS: gl.constexpr):
    """The same memory as [2, ROWS, 256] and [ROWS, 64]."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    latent = reinterpret(queries.latent, dtype, [2, ROWS, HALF], MATRIX)
    rope = reinterpret(queries.rope, dtype, [ROWS, 64], MATRIX)
    return Queries(latent, rope, queries.full, queries.free)


@gluon.jit
def new_keys(
    kv, PIECE: gl.constexpr, STAGES: gl.constexpr, FREED_BY_NAME: gl.constexpr = False
):
    """Memory for `STAGES` tiles that a descriptor brings.

    FREED_BY_NAME: named barriers free their halves.
    """
    SUB: gl.constexpr = TILE // PIECE
    HALVES: gl.constexpr = [STAGES * 4 * SUB, 1, PIECE, 64]
    left = gl.allocate_shared_memory(kv.dtype, HALVES, kv.layout)
    right = gl.allocate_shared_memory(kv.dtype, HALVES, kv.layout)
    rope = gl.allocate_shared_memory(kv.dtype, [STAGES * SUB, 1, PIECE, 64], kv.layout)
    left_full = new_barriers(STAGES)
    right_full = new_barriers(STAGES)
    free = left_full
    if not FREED_BY_NAME:
        free = new_barriers(STAGES)
    return Keys(left, right, rope, left_full, right_full, free)


@gluon.jit
def key_matrices(keys, dtype: gl.constexpr):
    """Two stages as [2, 64, 256] twice and [2, 64, 64]."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return Keys(
        reinterpret(keys.left, dtype, [2, TILE, HALF], MATRIX),
        reinterpret(keys.right, dtype, [2, TILE, HALF], MATRIX),
        reinterpret(keys.rope, dtype, [2, TILE, 64], MATRIX),
        keys.left_full,
        keys.right_full,
        keys.free,
    )


@gluon.jit
def new_handover(keys, ROWS: gl.constexpr):
    """Memory for what the scorer gives the multiplier, beside that of `keys`."""
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Handover(
        gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR),
        keys.rope,
        gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR),
        new_barriers(2),
    )
