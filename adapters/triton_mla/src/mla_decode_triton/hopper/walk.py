# mypy: ignore-errors
"""How a program walks its part of the batch: requests, and the tiles of each.

A tile is 64 tokens of one request; the work table (`schedule.plan_kernel`) says where
each part begins and ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_decode_triton.hopper.compat import aggregate, barrier

TILE = gl.constexpr(64)
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
HEADER = gl.constexpr(8)


@aggregate
class Part:
    """What one program works on: a part of the batch's tiles, and a tile of rows."""

    schedule: gl.tensor
    seq_lens: gl.tensor
    index: gl.tensor
    num_parts: gl.tensor
    num_reqs: gl.tensor
    num_rows: gl.tensor
    """Rows (token, head) of a request."""
    row0: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, schedule, seq_lens, index, num_parts, num_reqs, num_rows, row0
    ) -> None:
        self.schedule = schedule
        self.seq_lens = seq_lens
        self.index = index
        self.num_parts = num_parts
        self.num_reqs = num_reqs
        self.num_rows = num_rows
        self.row0 = row0


@gluon.jit
def part_range(part):
    """First request and tile of a part, its last ones, where to stop, first length."""
    entry = part.schedule + HEADER + part.index * 4
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
def signal(bar):
    """One arrival on behalf of all threads of the partition, once all are here."""
    barrier()
    mbarrier.arrive(bar, count=1)
