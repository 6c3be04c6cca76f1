# mypy: ignore-errors
"""The variant for many rows over an fp8 cache: tiles are widened in registers.

The consumers are `asym`'s, and so is what lies in shared memory; a warpgroup that widens
tiles is in the place of the copying warp. See `docs/hopper.md`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_decode_triton.hopper.multiplier import multiply
from mla_decode_triton.hopper.named_barriers import WARPGROUP
from mla_decode_triton.hopper.rows import Outputs
from mla_decode_triton.hopper.scorer import ROWS, score
from mla_decode_triton.hopper.storage import (
    Keys,
    key_matrices,
    new_barriers,
    new_handover,
    new_queries,
    query_matrices,
)
from mla_decode_triton.hopper.votes import declare_vote
from mla_decode_triton.hopper.walk import HALF, TILE, Part
from mla_decode_triton.hopper.words import widen


@gluon.jit
def _new_groups(dtype: gl.constexpr):
    """Two stages in the query's type, as groups of 64 columns."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = gl.allocate_shared_memory(dtype, [8, TILE, 64], MATRIX)
    right = gl.allocate_shared_memory(dtype, [8, TILE, 64], MATRIX)
    rope = gl.allocate_shared_memory(dtype, [2, TILE, 64], MATRIX)
    left_full = new_barriers(2)
    right_full = new_barriers(2)
    return Keys(left, right, rope, left_full, right_full, left_full)


@gluon.jit(
    do_not_specialize=[
        "num_heads",
        "query_len",
        "table_stride",
        "page_stride",
        "num_reqs",
        "num_parts",
    ],
    do_not_specialize_on_alignment=["table", "seq_lens", "lse", "kv_scale"],
)
def asym_fp8_kernel(
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
    page_stride,
    num_reqs,
    num_parts,
    CAUSAL: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    PAGE: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """As `asym_kernel`; `kv` is fp8 (e4m3), `kv_scale` float32 [1] what it is times.

    `kv` is no descriptor but a pointer to [pages, page, 576], aligned to 16 bytes, whose
    pages are `page_stride` times 16 bytes apart. PREFETCH: as in `widen`.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    EVERY_ROW: gl.constexpr = 1
    dtype: gl.constexpr = q_latent.dtype
    declare_vote()
    queries = new_queries(q_latent, q_rope, dtype, ROWS)
    groups = _new_groups(dtype)
    keys = key_matrices(groups, dtype)
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
                    kv_scale,
                    scale_log2,
                    num_heads,
                    query_len,
                    CAUSAL,
                    NEEDS_LSE,
                    EVERY_ROW,
                    WARPGROUP,
                    SCORES,
                    ACC,
                ),
            ),
            (multiply, (keys, given, part, outputs, kv_scale, WARPGROUP, ACC)),
            (
                widen,
                (
                    q_latent,
                    q_rope,
                    kv,
                    page_stride,
                    table,
                    table_stride,
                    queries,
                    groups,
                    part,
                    out,
                    lse,
                    ROWS,
                    PREFETCH,
                    NEEDS_LSE,
                    PAGE,
                ),
            ),
        ],
        [4, 4],
        [160, 112],
    )
