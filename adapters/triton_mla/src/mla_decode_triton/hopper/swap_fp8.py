# mypy: ignore-errors
"""The variant for few rows over an fp8 cache: tiles are widened in shared memory.

As `swap`, with a warpgroup between the copying warp and the consumer: a tile arrives as
fp8 in a single buffer whose halves have barriers of their own, and is written as the
query's type into the stage that the consumer reads. Two stages of that type and one fp8
buffer are what fits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from mla_decode_triton.hopper.compat import reinterpret
from mla_decode_triton.hopper.copying import produce
from mla_decode_triton.hopper.rows import Outputs
from mla_decode_triton.hopper.storage import (
    Keys,
    key_matrices,
    new_barriers,
    new_keys,
    new_queries,
    query_matrices,
)
from mla_decode_triton.hopper.swap import consume
from mla_decode_triton.hopper.walk import (
    TILE,
    Part,
    part_range,
    piece_range,
    signal,
)


@gluon.jit
def _widen(narrow, wide, part):
    """Write each half of a tile in the query's type, as it arrives and there is room.

    Both are groups of 64 columns: of one fp8 tile, and of two stages.
    """
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    dtype: gl.constexpr = wide.left.dtype
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    step = 0
    for req in range(req0, stop):
        next_len = gl.load(part.seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, _ = piece_range(req, seq_len, req0, tile0, req1, tile1)
        for _tile in range(first, last):
            stage = step & 1
            mbarrier.wait(narrow.left_full.index(0), step & 1)
            mbarrier.wait(wide.left_free.index(stage), ((step >> 1) & 1) ^ 1)
            wide.rope.index(stage).store(narrow.rope.index(0).load(BLOCK).to(dtype))
            for group in gl.static_range(4):
                part_of = wide.left.index(stage * 4 + group)
                part_of.store(narrow.left.index(group).load(BLOCK).to(dtype))
            fence_async_shared()
            signal(wide.left_full.index(stage))
            mbarrier.arrive(narrow.left_free.index(0), count=1)
            mbarrier.wait(narrow.right_full.index(0), step & 1)
            for group in gl.static_range(4):
                part_of = wide.right.index(stage * 4 + group)
                part_of.store(narrow.right.index(group).load(BLOCK).to(dtype))
            fence_async_shared()
            signal(wide.right_full.index(stage))
            mbarrier.arrive(narrow.right_free.index(0), count=1)
            step += 1
        seq_len = next_len


@gluon.jit
def _new_wide_keys(dtype: gl.constexpr):
    """Two stages in the query's type, as groups of 64 columns."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    free = new_barriers(2)
    return Keys(
        gl.allocate_shared_memory(dtype, [8, TILE, 64], MATRIX),
        gl.allocate_shared_memory(dtype, [8, TILE, 64], MATRIX),
        gl.allocate_shared_memory(dtype, [2, TILE, 64], MATRIX),
        new_barriers(2),
        new_barriers(2),
        free,
        free,
    )


@gluon.jit
def _narrow_groups(keys, dtype: gl.constexpr):
    """One fp8 tile as groups of 64 columns."""
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    return Keys(
        reinterpret(keys.left, dtype, [4, TILE, 64], NARROW),
        reinterpret(keys.right, dtype, [4, TILE, 64], NARROW),
        reinterpret(keys.rope, dtype, [1, TILE, 64], NARROW),
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
    ]
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
    dtype: gl.constexpr = q_latent.dtype
    queries = new_queries(q_latent, q_rope, dtype, ROWS)
    raw = new_keys(kv, PIECE, 1, False)
    wide = _new_wide_keys(dtype)
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
                    key_matrices(wide, dtype),
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
            (_widen, (_narrow_groups(raw, kv.dtype), wide, part)),
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
                    raw,
                    part,
                    out,
                    lse,
                    ROWS,
                    1,
                    True,
                    False,
                    NEEDS_LSE,
                    PAGE,
                    PIECE,
                ),
            ),
        ],
        [4, 1],
        [168, 40],
    )
