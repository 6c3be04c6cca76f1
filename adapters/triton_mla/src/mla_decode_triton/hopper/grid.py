"""How a step is laid over the device, and the memory that takes: loads no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mla_decode.device import DeviceInfo

H200_MULTIPROCESSORS = 132
"""Of an H100 SXM too; an H100 PCIe has 114, an H20 78."""
_TILE = 64
"""Keys of a tile."""
_FEW_ROWS = 16
_SHORT_WALK = 5
"""Tiles of a program, at most, where as few rows as can be are the fastest."""
_SHORT_WALK_OF_PIECES = 8
"""The same where programs of more rows would leave many pieces to merge."""
_MANY_PIECES = 16
_HEADER = 8
_INT32_BYTES = _FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How a batch's shape is laid over the device."""

    rows: int
    """Query rows (token, head) of one program."""
    row_tiles: int
    parts: int
    """Programs that share the batch's tiles; each takes one part for one row tile."""

    @property
    def swapped(self) -> bool:
        """Whether the variant for few rows serves it."""
        return is_swapped(self.rows)

    @property
    def block_parts(self) -> int:
        """The power of two that holds every boundary between parts."""
        return 1 << self.parts.bit_length()

    @property
    def schedule_entries(self) -> int:
        """int32 of the work table."""
        return _HEADER + 8 * self.block_parts

    def scratch_entries(self, max_num_reqs: int) -> int:
        """int32 that the planning of the work table needs."""
        return 2 * (1 << max_num_reqs.bit_length()) + 8 * self.block_parts

    def partial_rows(self, num_rows: int) -> int:
        """Rows of the pieces of split requests, whatever the batch."""
        return 2 * self.parts * num_rows


def count_multiprocessors(device: DeviceInfo) -> int:
    """Multiprocessors of a device; an H200's where there is no GPU to ask."""
    if device.assumed or not _gpu_is_present():
        return H200_MULTIPROCESSORS
    return _count_multiprocessors(device.index)


def _gpu_is_present() -> bool:
    import torch  # noqa: PLC0415 - torch stays out of discovery

    return torch.cuda.is_available()


@cache
def _count_multiprocessors(index: int) -> int:
    import torch  # noqa: PLC0415 - as above

    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def rows_of_program(num_rows: int) -> int:
    """Query rows of one program where a request has `num_rows`: 16, 32 or 64."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64


def is_swapped(num_rows: int) -> bool:
    """Whether the variant for few rows serves so many (Q * H of a request)."""
    return rows_of_program(num_rows) < 64


def count_row_tiles(num_rows: int) -> int:
    """Programs that share a request's rows; each walks the keys once."""
    return -(-num_rows // rows_of_program(num_rows))


def choose_rows(
    num_rows: int, num_reqs: int, max_seq_len: int, multiprocessors: int
) -> int:
    """Query rows of one program for a batch of so many requests, none longer.

    A program begins with its queries and ends with its results, float32 where others
    have a part of them. With few tiles in between that is most of its time, and more
    programs of fewer rows share it; each reads the keys again, and not from memory.

    Args:
        num_rows: Of a request, Q * H.
        num_reqs: Of the batch.
        max_seq_len: Tokens of the longest request, or a bound of them.
        multiprocessors: Of the device.
    """
    units = num_reqs * count_row_tiles(num_rows)
    share = num_reqs * -(-max_seq_len // _TILE) * -(-num_rows // _FEW_ROWS)
    is_cut_small = units * _MANY_PIECES <= multiprocessors
    most = _SHORT_WALK_OF_PIECES if is_cut_small else _SHORT_WALK
    is_short = share <= most * multiprocessors
    return _FEW_ROWS if is_short else rows_of_program(num_rows)


def choose_grid(num_rows: int, multiprocessors: int, rows: int | None = None) -> Grid:
    """Lay `num_rows` rows a request over one program a multiprocessor.

    Row tiles of the same part are neighbours in the grid: they read the same pages at
    the same time, once from memory and then from the second-level cache.

    Args:
        num_rows: Of a request, Q * H.
        multiprocessors: Of the device.
        rows: Of a program, by `choose_rows`; None: `rows_of_program`.
    """
    rows = rows or rows_of_program(num_rows)
    row_tiles = -(-num_rows // rows)
    return Grid(
        rows=rows, row_tiles=row_tiles, parts=max(1, multiprocessors // row_tiles)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeShape:
    """What one program of the merge holds at a time: pieces of rows, and columns."""

    rows: int
    """More than one: a warp each, by `merge_rows`. One: all warps share it."""
    pieces: int
    columns: int
    programs: int = 0
    """A multiprocessor, at most, which take turns; 0: as many as there may be units."""

    @property
    def blocks(self) -> int:
        """Programs that share a row."""
        return LATENT_WIDTH // self.columns


_BY_PIECES = (
    MergeShape(rows=4, pieces=2, columns=512),
    MergeShape(rows=4, pieces=4, columns=256),
    MergeShape(rows=4, pieces=8, columns=128),
    MergeShape(rows=1, pieces=16, columns=512, programs=16),
    MergeShape(rows=1, pieces=64, columns=64, programs=16),
)
_SELDOM = MergeShape(rows=4, pieces=4, columns=256, programs=4)
"""Where only requests of different lengths are cut: few programs are launched sooner."""
MERGE_SHAPES = (*_BY_PIECES, _SELDOM)
"""All there are, so that all can be compiled before the first step. A piece more than
fits costs a round, a row in several blocks costs programs; at most 64 registers."""
_LEAST_UNEVEN = 4
"""Pieces of a round where not all requests are cut into as many."""


def choose_merge(
    parts: int, num_reqs: int, max_seq_len: int | None = None
) -> MergeShape:
    """The smallest shape that holds the pieces of a request, were all as long.

    They are cut into pieces of one size where nearly all parts get one then, and
    otherwise at equal shares, which may lie across two pieces more. No piece is less
    than a tile.

    Args:
        parts: Of the grid.
        num_reqs: Of the batch.
        max_seq_len: Tokens of the longest request, or a bound of them, if one is known.
    """
    most = _BY_PIECES[-1].pieces
    if max_seq_len is not None:
        most = min(most, -(-max_seq_len // _TILE))
    return _merge_of(parts, max(num_reqs, 1), most)


@cache  # it is asked in every build
def _merge_of(parts: int, num_reqs: int, most_pieces: int) -> MergeShape:
    if 10 * num_reqs >= 9 * parts:
        return _SELDOM
    pieces = parts // num_reqs
    is_even = 10 * pieces * num_reqs >= 9 * parts
    if not is_even:
        pieces = max(pieces + 2, _LEAST_UNEVEN)
    pieces = min(pieces, most_pieces)
    fits = (shape for shape in _BY_PIECES if pieces <= shape.pieces)
    return next(fits, _BY_PIECES[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSize:
    """What the steps of a builder share: no two of them are under way at once."""

    schedule_entries: int
    scratch_entries: int
    partial_rows: int

    @classmethod
    def of(
        cls, nums_rows: Iterable[int], max_num_reqs: int, multiprocessors: int
    ) -> WorkspaceSize:
        """Enough for steps of any of these numbers of rows (Q * H) a request.

        Programs of fewer rows than `rows_of_program` has need no more.
        """
        grids = {rows: choose_grid(rows, multiprocessors) for rows in nums_rows}
        return cls(
            schedule_entries=max(g.schedule_entries for g in grids.values()),
            scratch_entries=max(
                g.scratch_entries(max_num_reqs) for g in grids.values()
            ),
            partial_rows=max(g.partial_rows(rows) for rows, g in grids.items()),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        integers = self.schedule_entries + self.scratch_entries
        floats = self.partial_rows * (LATENT_WIDTH + 1)
        return integers * _INT32_BYTES + floats * _FLOAT32_BYTES
