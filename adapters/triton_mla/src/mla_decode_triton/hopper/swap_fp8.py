# mypy: ignore-errors
"""The variant for few rows over an fp8 cache: tiles are widened in shared memory.

As `swap`, with two warpgroups between the copying warp and the consumer: a tile arrives
as fp8, and each of them writes a half of it in the query's type into the memory that the
consumer reads. That has room for two left halves and one right half, so that two fp8
tiles fit as well.
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
    new_barriers,
    new_keys,
    new_queries,
    query_matrices,
)
from mla_decode_triton.hopper.swap import consume
from mla_decode_triton.hopper.walk import (
    HALF,
    TILE,
    Part,
    part_range,
    piece_range,
    signal,
)
from mla_decode_triton.hopper.widening import widened


@gluon.jit
def _widen(narrow, wide, part, IS_LEFT: gl.constexpr):
    """Write one half of every tile in the query's type.

    The half lies in registers between the two memories, so that the fp8 one is refilled
    while this one waits for room. The rope part belongs to the left half.
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
            parity = (step >> 1) & 1
            if IS_LEFT:
                mbarrier.wait(narrow.left_full.index(stage), parity)
                codes = narrow.left.index(stage).load(BLOCK)
                rope_codes = narrow.rope.index(stage).load(BLOCK)
                signal(narrow.left_free.index(stage))
                left = widened(codes, dtype)
                mbarrier.wait(wide.left_free.index(stage), parity ^ 1)
                wide.rope.index(stage).store(widened(rope_codes, dtype))
                wide.left.index(stage).store(left)
                fence_async_shared()
                signal(wide.left_full.index(stage))
            else:
                mbarrier.wait(narrow.right_full.index(stage), parity)
                codes = narrow.right.index(stage).load(BLOCK)
                signal(narrow.right_free.index(stage))
                right = widened(codes, dtype)
                mbarrier.wait(wide.right_free.index(0), (step & 1) ^ 1)
                wide.right.index(0).store(right)
                fence_async_shared()
                signal(wide.right_full.index(0))
            step += 1
        seq_len = next_len


@gluon.jit
def _new_wide_keys(dtype: gl.constexpr):
    """In the query's type: two left halves with their ropes, one right half."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return Keys(
        gl.allocate_shared_memory(dtype, [2, TILE, HALF], MATRIX),
        gl.allocate_shared_memory(dtype, [1, TILE, HALF], MATRIX),
        gl.allocate_shared_memory(dtype, [2, TILE, 64], MATRIX),
        new_barriers(2),
        new_barriers(1),
        new_barriers(2),
        new_barriers(1),
    )


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
    raw = new_keys(kv, PIECE, 2, False)
    narrow = _narrow_matrices(raw, kv.dtype)
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
                    wide,
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
                    1,
                ),
            ),
            (_widen, (narrow, wide, part, True)),
            (_widen, (narrow, wide, part, False)),
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
        [112, 96, 48],
    )
