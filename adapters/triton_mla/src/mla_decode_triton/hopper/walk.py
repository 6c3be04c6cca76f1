# mypy: ignore-errors
"""What both variants of the kernel share: loading tiles, and which keys are in them.

A tile is 64 tokens of one request. It is loaded in pieces of `PIECE` = min(page, 64)
rows by 64 columns, so that any page size fills the same shared memory: 64 columns of a
16-bit type are one 128-byte swizzle row, and the pieces of a column group stacked over
each other are what a whole tile of that group would be.

Nothing past a request's length reaches shared memory. The last piece of a request,
where it holds `live` < `PIECE` tokens, is loaded from row ``live - PIECE`` on: the copy
engine fills rows before the page with zeros, and the live rows lie at the *bottom*. A
piece without any live token is asked of the page after the last, all zeros. So the
values that weights of zero multiply are zeros, and never another request's NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_decode_triton.hopper.compat import async_load, barrier

TILE = gl.constexpr(64)
LATENT = gl.constexpr(512)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.0e38)
NO_TOKEN = gl.constexpr(2147483647)
HEADER = gl.constexpr(8)


@gluon.jit
def part_range(schedule, part):
    """First request and tile of a part, its last ones, where to stop, first length."""
    entry = schedule + HEADER + part * 4
    req0 = gl.load(entry)
    tile0 = gl.load(entry + 1)
    len0 = gl.load(entry + 2)
    req1 = gl.load(entry + 4)
    tile1 = gl.load(entry + 5)
    stop = req1 + gl.where(tile1 > 0, 1, 0)
    return req0, tile0, req1, tile1, stop, len0


@gluon.jit
def piece_range(req, seq_len, req0, tile0, req1, tile1):
    """Tiles [first, last) of a request that belong to this part, and all its tiles."""
    num_tiles = (seq_len + TILE - 1) // TILE
    first = gl.where(req == req0, tile0, 0)
    last = gl.where(req == req1, tile1, num_tiles)
    return first, last, num_tiles


@gluon.jit
def piece_origin(
    table_row, token0, seq_len, num_pages, PAGE: gl.constexpr, PIECE: gl.constexpr
):
    """Page and first row to copy for the piece that starts at a token.

    Reads no slot of the table at or past ceil(seq_len / PAGE).
    """
    live = gl.minimum(seq_len - token0, PIECE)
    page = gl.load(table_row + token0 // PAGE, mask=live > 0, other=num_pages)
    row = token0 % PAGE - gl.where(live > 0, PIECE - live, 0)
    return page, row


@gluon.jit
def load_half(
    desc,
    table_row,
    token0,
    seq_len,
    num_pages,
    full,
    pieces,
    base,
    COLUMN: gl.constexpr,
    GROUPS: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
):
    """Copy `GROUPS` column groups of a tile into pieces [base, base + ...)."""
    SUB: gl.constexpr = TILE // PIECE
    for sub in gl.static_range(SUB):
        page, row = piece_origin(
            table_row, token0 + sub * PIECE, seq_len, num_pages, PAGE, PIECE
        )
        for group in gl.static_range(GROUPS):
            async_load(
                desc,
                [page, row, COLUMN + group * 64],
                full,
                pieces.index(base + (group * SUB + sub)),
            )


@gluon.jit
def tile_tokens(token0, seq_len, PIECE: gl.constexpr, LAYOUT: gl.constexpr):
    """The token that each row of a loaded tile holds; `NO_TOKEN` for rows of zeros."""
    slot = gl.arange(0, TILE, layout=LAYOUT)
    in_piece = slot % PIECE
    piece0 = token0 + (slot - in_piece)
    shift = PIECE - gl.minimum(gl.maximum(seq_len - piece0, 0), PIECE)
    return gl.where(in_piece < shift, NO_TOKEN, piece0 + in_piece - shift)


@gluon.jit
def signal(bar):
    """One arrival on behalf of all threads of the partition, once all are here."""
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def write_empty(
    out,
    lse,
    seq_lens,
    part,
    num_parts,
    num_reqs,
    num_rows,
    row0,
    NEEDS_LSE: gl.constexpr,
    ROWS: gl.constexpr,
):
    """EMPTY rows (out = 0, lse = -inf) of every request that has no key.

    Request r is the duty of part r mod num_parts, for its own tile of rows. Meant for
    a partition of one warp.
    """
    COLUMNS: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    columns = gl.arange(0, LATENT, layout=COLUMNS)
    zeros = gl.full([LATENT], 0.0, out.dtype.element_ty, layout=COLUMNS)
    for req in range(part, num_reqs, num_parts):
        if gl.load(seq_lens + req) <= 0:
            base = req.to(gl.int64) * num_rows
            for row in range(row0, gl.minimum(row0 + ROWS, num_rows)):
                gl.store(out + (base + row) * LATENT + columns, zeros)
                if NEEDS_LSE:
                    gl.store(lse + base + row, float("-inf"))
