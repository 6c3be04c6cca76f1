# mypy: ignore-errors
"""Tiles of an fp8 cache brought through registers, by a warpgroup of their own.

The warpgroup loads a tile as 32-bit words of four values, a register each, and writes it
in the query's type into the stage that consumers read. No fp8 tile lies in shared memory,
which has no room for one beside 64 rows of queries and two stages. The tiles after the
next are asked into the second-level cache, so that what is waited for is near.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_decode_triton.hopper.copying import load_queries, write_empty
from mla_decode_triton.hopper.named_barriers import (
    LEFT_IS_FREE,
    RIGHT_IS_FREE,
    WARPGROUP,
    take,
    take_both,
)
from mla_decode_triton.hopper.walk import TILE, part_range, piece_range, signal
from mla_decode_triton.hopper.widening import widened

WARPS = gl.constexpr(4)
WORD = gl.constexpr(4)
GROUP_WORDS = gl.constexpr(64 // 4)
ROW_WORDS = gl.constexpr(576 // 4)
STRIDE_WORDS = gl.constexpr(16 // 4)
"""Words of the unit that page strides are counted in."""
PREFETCH_16_ROWS = gl.constexpr("""{
    .reg .pred p;
    setp.ne.s32 p, $2, 0;
    mov.b32 $0, 0;
    @p cp.async.bulk.prefetch.L2.global [$1], 9216;
}""")


@gluon.jit
def _locate(kv, page_stride, table_row, tokens, limit, PAGE: gl.constexpr):
    """Where the rows of tokens begin, and which of them are before a limit.

    Reads no slot of the table for those that are not.
    """
    here = tokens < limit
    page = gl.load(table_row + tokens // PAGE, mask=here, other=0)
    offset = page.to(gl.int64) * page_stride * STRIDE_WORDS + tokens % PAGE * ROW_WORDS
    return kv + offset, here


@gluon.jit
def _locate_tile(
    kv, page_stride, table_row, token0, limit, PAGE: gl.constexpr, LAYOUT: gl.constexpr
):
    """As `_locate`, for the rows of a tile, as [64, 1]."""
    tokens = token0 + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    origin, here = _locate(kv, page_stride, table_row, tokens, limit, PAGE)
    return gl.expand_dims(origin, 1), gl.expand_dims(here, 1)


@gluon.jit
def _load_group(origin, here, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of 64 columns of a tile, zeros where it has no token."""
    words = gl.arange(0, GROUP_WORDS, layout=gl.SliceLayout(0, LAYOUT))
    pointers = origin + gl.expand_dims(GROUP * GROUP_WORDS + words, 0)
    return gl.load(pointers, mask=here, other=0, cache_modifier=".cg")


@gluon.jit
def _load_half(origin, here, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Four groups of columns, from a given one on."""
    return (
        _load_group(origin, here, GROUP, LAYOUT),
        _load_group(origin, here, GROUP + 1, LAYOUT),
        _load_group(origin, here, GROUP + 2, LAYOUT),
        _load_group(origin, here, GROUP + 3, LAYOUT),
    )


@gluon.jit
def _prefetch(kv, page_stride, table_row, token0, limit, PAGE: gl.constexpr):
    """Ask a tile into the second-level cache, 16 rows a warp: no page is smaller."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    pieces = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
    tokens = token0 + pieces * (TILE // WARPS)
    origin, here = _locate(kv, page_stride, table_row, tokens, limit, PAGE)
    gl.inline_asm_elementwise(
        PREFETCH_16_ROWS,
        "=r,l,r",
        [origin, here.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _widen(words, dtype: gl.constexpr):
    """The values of words, [rows, words] as [rows, 4 * words].

    Codes are taken out of a word and `widened` puts them back: no instruction is left.
    """
    even = gl.join(gl.cast(words, gl.int8), gl.cast(words >> 16, gl.int8))
    odd = gl.join(gl.cast(words >> 8, gl.int8), gl.cast(words >> 24, gl.int8))
    codes = gl.reshape(gl.join(even, odd), [words.shape[0], words.shape[1] * WORD])
    codes = gl.cast(codes, gl.float8e4nv, bitcast=True)
    return widened(codes, dtype)


@gluon.jit
def widen(
    q_latent,
    q_rope,
    kv,
    page_stride,
    table,
    table_stride,
    queries,
    keys,
    part,
    out,
    lse,
    ROWS: gl.constexpr,
    PREFETCH: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Bring all that the part's items need, in order; then write its EMPTY rows.

    `keys` are two stages as groups of 64 columns. Each half of a tile is on its way into
    registers from when the same half of the tile before it has been written. PREFETCH:
    how many tiles ahead the second-level cache is filled; 0 for not.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WORD], [8, 4], [WARPS, 1], [1, 0])
    kv = gl.cast(kv, gl.pointer_type(gl.int32), bitcast=True)
    dtype: gl.constexpr = keys.left.dtype
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(part.seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, _ = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            table_row = table + req.to(gl.int64) * table_stride
            limit = gl.minimum(seq_len, last * TILE)
            token0 = first * TILE
            origin, here = _locate_tile(
                kv, page_stride, table_row, token0, limit, PAGE, LAYOUT
            )
            left = _load_half(origin, here, 0, LAYOUT)
            right = _load_half(origin, here, 4, LAYOUT)
            rope = _load_group(origin, here, 8, LAYOUT)
            for ahead in gl.static_range(1, PREFETCH):
                _prefetch(
                    kv, page_stride, table_row, token0 + ahead * TILE, limit, PAGE
                )
            load_queries(q_latent, q_rope, queries, req, part.row0, item, ROWS)
            for tile in range(first, last):
                stage = step & 1
                token0 = tile * TILE
                if PREFETCH:
                    _prefetch(
                        kv,
                        page_stride,
                        table_row,
                        token0 + PREFETCH * TILE,
                        limit,
                        PAGE,
                    )
                origin, here = _locate_tile(
                    kv, page_stride, table_row, token0 + TILE, limit, PAGE, LAYOUT
                )
                take(LEFT_IS_FREE + stage, WARPGROUP + WARPGROUP)
                for group in gl.static_range(4):
                    part_of = keys.left.index(stage * 4 + group)
                    part_of.store(_widen(left[group], dtype))
                fence_async_shared()
                signal(keys.left_full.index(stage))
                left = _load_half(origin, here, 0, LAYOUT)
                take(RIGHT_IS_FREE + stage, WARPGROUP + WARPGROUP)
                for group in gl.static_range(4):
                    part_of = keys.right.index(stage * 4 + group)
                    part_of.store(_widen(right[group], dtype))
                keys.rope.index(stage).store(_widen(rope, dtype))
                fence_async_shared()
                signal(keys.right_full.index(stage))
                right = _load_half(origin, here, 4, LAYOUT)
                rope = _load_group(origin, here, 8, LAYOUT)
                step += 1
            item += 1
        seq_len = next_len
    write_empty(part, out, lse, NEEDS_LSE, ROWS)
    take_both(LEFT_IS_FREE, WARPGROUP + WARPGROUP)
    take_both(RIGHT_IS_FREE, WARPGROUP + WARPGROUP)
