# mypy: ignore-errors
"""The work table: one small kernel cuts a batch's tiles into balanced parts.

All tiles of 64 tokens of all requests lie on one line, request after request. The
table is the positions where that line is cut: part k walks from boundary k to boundary
k + 1, which may end in the middle of a request, cover several, or be empty.

Boundaries are multiples of a stride on a *cost* line, on which a request costs its tiles
and a fixed overhead (queries in, outputs out). Four strides compete and the one with
the smallest estimated makespan wins: the one that divides the longest request evenly
(uniform batches: no request is cut where that buys nothing), the equal split with and
without the overhead, and a slack one that lets a part finish its request.

Nothing is read on the host, no size depends on the lengths, and the table stays where it
is: a captured graph may hold this kernel or only its result.

Layout, int32: [0] number of split requests; from [8 + 4 * k] on, request, tile, and the
request's length, of boundary k, 0 <= k <= parts (request = num_reqs at the end of the
line, its length 0); from `8 + 4 * BLOCK_PARTS` on, 4 numbers a split request: the request, its first part, and how
many pieces up to that part continue a request (so the difference to the next entry, plus
one, is this request's number of pieces; one entry past the last closes the list). The
piece of part k that begins a request has slot 2 * k + 1, the one that continues a request
slot 2 * k.
"""

import triton
import triton.language as tl

# tl.max and tl.sum are compiled functions: interpreted kernels cannot call them.
from triton.language.standard import (
    _elementwise_max,
    _sum_combine,
)

_TILE = tl.constexpr(64)
_HEADER = tl.constexpr(8)
_CANDIDATES = tl.constexpr(4)


@triton.jit
def _boundary(
    k,
    prefix,
    num_reqs,
    num_parts,
    numerator,
    denominator,
    overhead,
    snap,
    BLOCK_REQS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Request and tile where the boundaries `k` of one candidate lie."""
    used = prefix + BLOCK_REQS
    cost = (k.to(tl.int64) * numerator // denominator).to(tl.int32)
    request = k * 0
    for level in tl.static_range(STEPS):
        trial = request + (1 << (STEPS - 1 - level))
        known = trial <= num_reqs
        tiles = tl.load(prefix + trial, mask=known, other=0)
        before = tl.load(used + trial, mask=known, other=0)
        request = tl.where(known & (tiles + overhead * before <= cost), trial, request)
    inside = (request < num_reqs) & (k < num_parts)
    start = tl.load(prefix + request, mask=inside, other=0)
    tiles = tl.load(prefix + request + 1, mask=inside, other=0) - start
    before = tl.load(used + request, mask=inside, other=0)
    tile = tl.maximum(cost - start - overhead * (before + 1), 0)
    tile = tl.where(tile < snap, 0, tile)
    at_end = inside & (tile > 0) & (tiles - tile < snap)
    request = tl.where(inside, request + at_end.to(tl.int32), num_reqs)
    return request, tl.where(inside & (at_end == 0), tile, 0)


@triton.jit(
    do_not_specialize=["num_reqs", "num_parts"],
    do_not_specialize_on_alignment=["seq_lens"],
)
def plan_kernel(
    seq_lens,
    table,
    scratch,
    num_reqs,
    num_parts,
    OVERHEAD: tl.constexpr,
    MERGE: tl.constexpr,
    PIECE: tl.constexpr,
    SNAP: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Cut the batch into `num_parts` parts. One program.

    `seq_lens` int32 [num_reqs]; `table` int32 [8 + 8 * BLOCK_PARTS]; `scratch` int32
    [2 * BLOCK_REQS + 8 * BLOCK_PARTS]. BLOCK_REQS > num_reqs and BLOCK_PARTS > num_parts
    are powers of two, BLOCK_REQS = 2 ** STEPS. Costs are in tiles: OVERHEAD of an item
    of a part, MERGE of having any split, PIECE of every piece that is merged, which all
    parts share. SNAP: a boundary nearer than this to an end of its request moves there.
    MIN_TILES: no part is meant to be smaller.
    """
    requests = tl.arange(0, BLOCK_REQS)
    lens = tl.load(seq_lens + requests, mask=requests < num_reqs, other=0)
    tiles = (tl.maximum(lens, 0) + _TILE - 1) // _TILE
    used = (tiles > 0).to(tl.int32)
    tiles_up_to = tl.associative_scan(tiles, 0, _sum_combine)
    used_up_to = tl.associative_scan(used, 0, _sum_combine)
    tl.store(scratch + requests, tiles_up_to - tiles)
    tl.store(scratch + BLOCK_REQS + requests, used_up_to - used)
    total = tl.reduce(tiles, 0, _sum_combine)
    num_used = tl.reduce(used, 0, _sum_combine)
    longest = tl.maximum(tl.reduce(tiles, 0, _elementwise_max), 1)
    tl.debug_barrier()

    # Strides as fractions: boundary k lies at k * numerator // denominator.
    least = MIN_TILES * num_parts
    share = tl.maximum(tl.maximum(total + OVERHEAD * num_used, least), 1)
    plain = tl.maximum(tl.maximum(total, least), 1)
    cuts = tl.minimum((longest * num_parts) // plain, longest // MIN_TILES)
    whole = (total + num_parts * longest - 1) // (num_parts * longest)
    even = longest * tl.where(cuts >= 1, 1, tl.maximum(whole, 1))

    parts = tl.arange(0, BLOCK_PARTS)
    trial = scratch + 2 * BLOCK_REQS
    best = tl.full([], 2147483647, tl.int32)
    chosen = tl.full([], 0, tl.int32)
    for candidate in tl.static_range(_CANDIDATES):
        numerator = share
        denominator = num_parts
        overhead = OVERHEAD
        if candidate == 2:
            numerator = share + OVERHEAD * num_parts
        if candidate == 0:
            numerator = even
            denominator = tl.maximum(cuts, 1)
            overhead = 0
        if candidate == 3:
            numerator = plain
            overhead = 0
        snap = tl.maximum(tl.minimum(SNAP, numerator // (4 * denominator)), 1)
        request, tile = _boundary(
            parts,
            scratch,
            num_reqs,
            num_parts,
            numerator,
            denominator,
            overhead,
            snap,
            BLOCK_REQS,
            STEPS,
        )
        mine = trial + candidate * 2 * BLOCK_PARTS
        tl.store(mine + parts, request)
        tl.store(mine + BLOCK_PARTS + parts, tile)
        tl.debug_barrier()
        is_part = parts < num_parts
        next_request = tl.load(mine + parts + 1, mask=is_part, other=0)
        next_tile = tl.load(mine + BLOCK_PARTS + parts + 1, mask=is_part, other=0)
        walked = (
            tl.load(scratch + next_request, mask=is_part, other=0)
            + next_tile
            - tl.load(scratch + request, mask=is_part, other=0)
            - tile
        )
        pieces = (
            tl.load(scratch + BLOCK_REQS + next_request, mask=is_part, other=0)
            + (next_tile > 0).to(tl.int32)
            - tl.load(scratch + BLOCK_REQS + request, mask=is_part, other=0)
        )
        cost = tl.where(is_part, walked + OVERHEAD * pieces, 0)
        opens = is_part & (next_tile > 0) & ((request < next_request) | (tile == 0))
        merged = opens.to(tl.int32) + (is_part & (tile > 0)).to(tl.int32)
        num_merged = tl.reduce(merged, 0, _sum_combine)
        merging = MERGE + (PIECE * num_merged + num_parts - 1) // num_parts
        makespan = tl.reduce(cost, 0, _elementwise_max)
        makespan += tl.where(num_merged > 0, merging, 0)
        chosen = tl.where(makespan < best, candidate, chosen)
        best = tl.minimum(makespan, best)

    mine = trial + chosen * 2 * BLOCK_PARTS
    request = tl.load(mine + parts)
    tile = tl.load(mine + BLOCK_PARTS + parts)
    boundary = table + _HEADER + parts * 4
    tl.store(boundary, request)
    tl.store(boundary + 1, tile)
    length = tl.load(seq_lens + request, mask=request < num_reqs, other=0)
    tl.store(boundary + 2, length)

    is_part = parts < num_parts
    next_request = tl.load(mine + parts + 1, mask=is_part, other=0)
    next_tile = tl.load(mine + BLOCK_PARTS + parts + 1, mask=is_part, other=0)
    opens = is_part & (next_tile > 0) & ((request < next_request) | (tile == 0))
    rank = tl.associative_scan(opens.to(tl.int32), 0, _sum_combine) - 1
    continues = (is_part & (tile > 0)).to(tl.int32)
    continued = tl.associative_scan(continues, 0, _sum_combine)
    num_splits = tl.reduce(opens.to(tl.int32), 0, _sum_combine)
    entry = table + _HEADER + 4 * BLOCK_PARTS + rank * 4
    tl.store(entry, next_request, mask=opens)
    tl.store(entry + 1, parts, mask=opens)
    tl.store(entry + 2, continued, mask=opens)
    sentinel = table + _HEADER + 4 * BLOCK_PARTS + num_splits * 4
    tl.store(sentinel + 2, tl.reduce(continues, 0, _sum_combine))
    tl.store(table, num_splits)
