"""Tile shapes by architecture, as data: what fits its registers and shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one program of the decode kernel is cut."""

    rows: int
    """(token, head) rows of a program."""
    tokens: int
    """Keys of one step of the walk."""
    num_warps: int
    stages: int
    """Depth of the software pipeline of the walk."""
    detached: bool = False
    """Scores and weights live in a region of their own, so that warp groups share out
    the tokens of a tile. Triton would otherwise have each of them compute all the scores
    of few rows; the weights then pass through shared memory.
    """
    paired: bool = False
    """An fp8 cache is read as pairs of columns, which become float16 in the registers of
    the matrix unit, and each row of the query is divided by a power of two, to fit. Not
    for products of 64 rows, whose keys the matrix unit takes from shared memory.
    """
    max_registers: int | None = None
    """Of a thread, where the compiler is held to it for the sake of the residents."""
    residents: int = 1
    """Programs that one multiprocessor or compute unit holds at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchTiles:
    """An architecture's tiles, fewest rows first, and the limits that they obey."""

    arch: str
    tiles: tuple[Tile, ...]
    fp8_tiles: tuple[Tile, ...] = ()
    """For an fp8 cache; none where it is not served."""
    shared_bytes: int
    """Shared memory (LDS) that one program may have."""
    warp_size: int
    num_units: int
    """Multiprocessors or compute units of the largest device of the architecture."""
    matrix_instructions: tuple[str, ...]
    """One of these stands in the listing of a compiled decode kernel."""
    widens_fp8_in_ptx: bool = False
    """Whether fp8 is widened by our own instructions and not by Triton's."""

    def tile(self, num_rows: int, kv_dtype: str) -> Tile:
        """The smallest tile that holds the rows, or the largest there is."""
        tiles = self._tiles_of(kv_dtype)
        return next((tile for tile in tiles if tile.rows >= num_rows), tiles[-1])

    def most_rows(self, kv_dtype: str) -> int:
        """Rows of the largest tile: what one walk of the KV can serve."""
        tiles = self._tiles_of(kv_dtype)
        return tiles[-1].rows if tiles else 1

    def _tiles_of(self, kv_dtype: str) -> tuple[Tile, ...]:
        return self.fp8_tiles if kv_dtype == "fp8" else self.tiles


_NARROW = Tile(rows=16, tokens=32, num_warps=4, stages=3, residents=2)
_NARROW_FP8 = Tile(rows=16, tokens=32, num_warps=4, stages=3, paired=True, residents=2)
_HOPPER_NARROW_FP8 = Tile(
    rows=16, tokens=64, num_warps=4, stages=3, paired=True, residents=2
)
"""Of nine tiles timed on an H200 the fastest: 0.75 of the bf16 walk, 0.88 of
`_NARROW_FP8`. It takes every register that a thread may have under Triton 3.6, which
still spills 48 to 64 bytes of it with pages of one token; 3.9 spills none.
"""
_MIDDLE = Tile(rows=32, tokens=32, num_warps=8, stages=2)
_WIDE = Tile(rows=64, tokens=64, num_warps=8, stages=2, detached=True)
_BLACKWELL_WIDE = Tile(rows=64, tokens=32, num_warps=8, stages=3, detached=True)
"""The largest that spills nothing under Triton 3.9, and never timed: `_WIDE` spills 16
bytes there. A third stage keeps as many bytes on their way."""
_WIDE_FP8 = Tile(rows=64, tokens=64, num_warps=8, stages=3, detached=True)
_MIDDLE_DETACHED = Tile(rows=32, tokens=32, num_warps=8, stages=2, detached=True)
_CDNA_NARROW = Tile(rows=16, tokens=32, num_warps=4, stages=1)
_CDNA_MIDDLE = Tile(rows=32, tokens=32, num_warps=4, stages=1)
"""One stage: a tile in flight lives in registers, which two would overflow."""


def _ampere(arch: str, *, shared_kib: int, num_units: int) -> ArchTiles:
    return ArchTiles(
        arch=arch,
        tiles=(_NARROW, _MIDDLE),
        shared_bytes=shared_kib * 1024,
        warp_size=32,
        num_units=num_units,
        matrix_instructions=("mma.sync",),
    )


def _blackwell(arch: str, *, num_units: int) -> ArchTiles:
    return ArchTiles(
        arch=arch,
        tiles=(_NARROW, _BLACKWELL_WIDE),
        fp8_tiles=(_NARROW_FP8, _MIDDLE_DETACHED),
        shared_bytes=227 * 1024,
        warp_size=32,
        num_units=num_units,
        matrix_instructions=("tcgen05.mma", "mma.sync"),
        widens_fp8_in_ptx=True,
    )


def _cdna(arch: str, *, lds_kib: int, num_units: int) -> ArchTiles:
    return ArchTiles(
        arch=arch,
        tiles=(_CDNA_NARROW, _CDNA_MIDDLE),
        fp8_tiles=(_CDNA_NARROW, _CDNA_MIDDLE),
        shared_bytes=lds_kib * 1024,
        warp_size=64,
        num_units=num_units,
        matrix_instructions=("v_mfma",),
    )


ARCH_TILES = MappingProxyType(
    {
        tiles.arch: tiles
        for tiles in (
            _cdna("gfx942", lds_kib=64, num_units=304),
            _cdna("gfx950", lds_kib=160, num_units=256),
            ArchTiles(
                arch="sm_90",
                tiles=(_NARROW, _WIDE),
                fp8_tiles=(_HOPPER_NARROW_FP8, _WIDE_FP8),
                shared_bytes=227 * 1024,
                warp_size=32,
                num_units=132,
                matrix_instructions=("wgmma.mma_async", "mma.sync"),
                widens_fp8_in_ptx=True,
            ),
            _blackwell("sm_100", num_units=148),
            _blackwell("sm_103", num_units=160),
            _ampere("sm_80", shared_kib=163, num_units=108),
            _ampere("sm_86", shared_kib=99, num_units=84),
            _ampere("sm_89", shared_kib=99, num_units=142),
            _ampere("sm_120", shared_kib=99, num_units=188),
        )
    }
)
"""By the vendor's architecture name; the first is the one interpreted by default."""
