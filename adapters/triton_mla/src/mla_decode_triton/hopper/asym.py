# mypy: ignore-errors
"""The variant for many rows: 64 (token, head) rows a program, two consumer warpgroups.

One warpgroup scores every tile and owns output columns 0..255; the other multiplies the
weights into columns 256..511. One warp drives the copy engine. See `docs/hopper.md`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_decode_triton.hopper.copying import produce
from mla_decode_triton.hopper.multiplier import multiply
from mla_decode_triton.hopper.named_barriers import WARPGROUP
from mla_decode_triton.hopper.rows import Outputs
from mla_decode_triton.hopper.scorer import ROWS, score
from mla_decode_triton.hopper.storage import (
    key_matrices,
    new_handover,
    new_keys,
    new_queries,
    query_matrices,
)
from mla_decode_triton.hopper.votes import declare_vote
from mla_decode_triton.hopper.walk import HALF, TILE, Part


@gluon.jit(
    do_not_specialize=[
        "num_heads",
        "query_len",
        "table_stride",
        "num_pages",
        "num_reqs",
        "num_parts",
    ],
    do_not_specialize_on_alignment=["table", "seq_lens", "lse"],
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
):
    """Attend 64 rows of each request over one part of the batch's tiles.

    Grid: (row tiles, parts). `q_latent` and `q_rope` are descriptors of [requests, rows,
    512] and [requests, rows, 64] with boxes [1, 64, 64]; `kv` of [pages, page, 576] with
    boxes [1, min(page, 64), 64]. `schedule` is `plan_kernel`'s. Pieces of a split
    request go to `partial_out` float32 [2 * parts, rows, 512] and `partial_lse` float32
    [2 * parts, rows] (log2); all else to `out` [requests * rows, 512] and `lse`.
    """
    PIECE: gl.constexpr = PAGE if PAGE < TILE else TILE
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    BRINGING: gl.constexpr = 32
    dtype: gl.constexpr = kv.dtype
    declare_vote()
    queries = new_queries(q_latent, q_rope, dtype, ROWS)
    boxes = new_keys(kv, PIECE, 2, True)
    keys = key_matrices(boxes, dtype)
    given = new_handover(keys, ROWS)
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
                score,
                (
                    query_matrices(queries, dtype, ROWS),
                    keys,
                    given,
                    part,
                    outputs,
                    None,
                    scale_log2,
                    num_heads,
                    query_len,
                    CAUSAL,
                    NEEDS_LSE,
                    PIECE,
                    BRINGING,
                    SCORES,
                    ACC,
                ),
            ),
            (multiply, (keys, given, part, outputs, None, BRINGING, ACC)),
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
                    NEEDS_LSE,
                    PAGE,
                    PIECE,
                    WARPGROUP + BRINGING,
                ),
            ),
        ],
        [4, 1],
        [200, 48],
    )
