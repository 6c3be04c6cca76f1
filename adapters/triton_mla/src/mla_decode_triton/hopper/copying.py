# mypy: ignore-errors
"""The copying warp, of every variant: queries, tiles, and rows of empty requests.

A tile is loaded in pieces of `PIECE` = min(page, 64) rows by 64 columns, so that any
page size fills the same shared memory.

Nothing past a request's length reaches shared memory. The last piece of a request,
where it holds `live` < `PIECE` tokens, is loaded from row ``live - PIECE`` on: the copy
engine fills rows before the page with zeros, and the live rows lie at the *bottom*. A
piece without any live token is asked of the page after the last, all zeros. So the
values that weights of zero multiply are zeros, and never another request's NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_decode_triton.hopper.compat import async_load
from mla_decode_triton.hopper.named_barriers import (
    LEFT_IS_FREE,
    RIGHT_IS_FREE,
    take,
    take_both,
)
from mla_decode_triton.hopper.walk import HALF, LATENT, TILE, part_range, piece_range


@gluon.jit
def tile_pages(
    table_row, token0, seq_len, num_pages, PAGE: gl.constexpr, PIECE: gl.constexpr
):
    """The page to copy each piece of a tile from.

    Reads no slot of the table at or past ceil(seq_len / PAGE).
    """
    pages = ()
    for sub in gl.static_range(TILE // PIECE):
        token = token0 + sub * PIECE
        slot = table_row + token // PAGE
        page = gl.load(slot, mask=token < seq_len, other=num_pages)
        pages = pages + (page,)  # noqa: RUF005 - Triton has no unpacking here
    return pages


@gluon.jit
def load_columns(
    kv,
    pages,
    token0,
    seq_len,
    full,
    pieces,
    stage,
    COLUMN: gl.constexpr,
    GROUPS: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
):
    """Copy `GROUPS` groups of 64 columns of a tile into its stage."""
    SUB: gl.constexpr = TILE // PIECE
    base = stage * (GROUPS * SUB)
    for sub in gl.static_range(SUB):
        token = token0 + sub * PIECE
        live = gl.minimum(seq_len - token, PIECE)
        row = token % PAGE - gl.where(live > 0, PIECE - live, 0)
        for group in gl.static_range(GROUPS):
            async_load(
                kv,
                [pages[sub], row, COLUMN + group * 64],
                full,
                pieces.index(base + (group * SUB + sub)),
            )


@gluon.jit
def load_queries(q_latent, q_rope, queries, req, row0, item, ROWS: gl.constexpr):
    """Copy the queries of the next request, as soon as those of the last are used."""
    BYTES: gl.constexpr = q_latent.dtype.primitive_bitwidth // 8
    mbarrier.wait(queries.free, (item & 1) ^ 1)
    mbarrier.expect(queries.full, ROWS * 576 * BYTES)
    for group in gl.static_range(8):
        async_load(
            q_latent, [req, row0, group * 64], queries.full, queries.latent.index(group)
        )
    async_load(q_rope, [req, row0, 0], queries.full, queries.rope.index(0))


@gluon.jit
def produce(
    q_latent,
    q_rope,
    kv,
    table,
    table_stride,
    num_pages,
    queries,
    keys,
    part,
    out,
    lse,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    ROPE_FIRST: gl.constexpr,
    NEEDS_LSE: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
    NAMED: gl.constexpr = 0,
):
    """Bring all that the part's items need, in order; then write its EMPTY rows.

    ROPE_FIRST: the rope part comes with the left half of a tile and not with the right
    one. STAGES is 1, 2 or 4. NAMED: how many threads meet at the named barriers that
    free the halves of two stages; 0 where `keys` have the barriers that free stages.
    """
    BYTES: gl.constexpr = kv.dtype.primitive_bitwidth // 8
    LEFT: gl.constexpr = TILE * (HALF + 64 if ROPE_FIRST else HALF) * BYTES
    RIGHT: gl.constexpr = TILE * (HALF if ROPE_FIRST else HALF + 64) * BYTES
    req0, tile0, req1, tile1, stop, seq_len = part_range(part)
    step = 0
    item = 0
    for req in range(req0, stop):
        next_len = gl.load(part.seq_lens + gl.minimum(req + 1, stop - 1))
        first, last, _ = piece_range(req, seq_len, req0, tile0, req1, tile1)
        if first < last:
            table_row = table + req.to(gl.int64) * table_stride
            load_queries(q_latent, q_rope, queries, req, part.row0, item, ROWS)
            for tile in range(first, last):
                stage = step & (STAGES - 1)
                parity = ((step // STAGES) & 1) ^ 1
                token0 = tile * TILE
                # Before the wait for room, so that it hides the table's latency.
                pages = tile_pages(table_row, token0, seq_len, num_pages, PAGE, PIECE)
                left_full = keys.left_full.index(stage)
                right_full = keys.right_full.index(stage)
                if NAMED:
                    take(LEFT_IS_FREE + stage, NAMED)
                else:
                    mbarrier.wait(keys.free.index(stage), parity)
                mbarrier.expect(left_full, LEFT)
                if ROPE_FIRST:
                    load_columns(
                        kv,
                        pages,
                        token0,
                        seq_len,
                        left_full,
                        keys.rope,
                        stage,
                        LATENT,
                        1,
                        PAGE,
                        PIECE,
                    )
                load_columns(
                    kv,
                    pages,
                    token0,
                    seq_len,
                    left_full,
                    keys.left,
                    stage,
                    0,
                    4,
                    PAGE,
                    PIECE,
                )
                if NAMED:
                    take(RIGHT_IS_FREE + stage, NAMED)
                mbarrier.expect(right_full, RIGHT)
                load_columns(
                    kv,
                    pages,
                    token0,
                    seq_len,
                    right_full,
                    keys.right,
                    stage,
                    HALF,
                    4,
                    PAGE,
                    PIECE,
                )
                if not ROPE_FIRST:
                    load_columns(
                        kv,
                        pages,
                        token0,
                        seq_len,
                        right_full,
                        keys.rope,
                        stage,
                        LATENT,
                        1,
                        PAGE,
                        PIECE,
                    )
                step += 1
            item += 1
        seq_len = next_len
    write_empty(part, out, lse, NEEDS_LSE, ROWS)
    if NAMED:
        take_both(LEFT_IS_FREE, NAMED)
        take_both(RIGHT_IS_FREE, NAMED)


@gluon.jit
def write_empty(part, out, lse, NEEDS_LSE: gl.constexpr, ROWS: gl.constexpr):
    """EMPTY rows (out = 0, lse = -inf) of every request that has no key.

    Request r is the duty of part r mod num_parts, for its own tile of rows.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = gl.BlockedLayout([8 // WARPS], [32], [WARPS], [0])
    columns = gl.arange(0, LATENT, layout=COLUMNS)
    zeros = gl.full([LATENT], 0.0, out.dtype.element_ty, layout=COLUMNS)
    last_row = gl.minimum(part.row0 + ROWS, part.num_rows)
    for req in range(part.index, part.num_reqs, part.num_parts):
        if gl.load(part.seq_lens + req) <= 0:
            base = req.to(gl.int64) * part.num_rows
            for row in range(part.row0, last_row):
                gl.store(out + (base + row) * LATENT + columns, zeros)
                if NEEDS_LSE:
                    gl.store(lse + base + row, float("-inf"))
