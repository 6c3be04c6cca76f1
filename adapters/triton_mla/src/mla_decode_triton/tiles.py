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
    swapped: bool = False
    """Scores as [tokens, rows]: few rows do not pad to a 64-row matrix instruction."""
    descriptors: bool = False
    """Whole tiles come through tensor descriptors (TMA) where pages allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchTiles:
    """An architecture's tiles, smallest first, and the limits that they obey."""

    arch: str
    tiles: tuple[Tile, ...]
    fp8_tiles: tuple[Tile, ...]
    """For an fp8 cache, whose tile is also held dequantised."""
    shared_bytes: int
    """Shared memory (LDS) that one program may have."""
    warp_size: int
    matrix_instructions: tuple[str, ...]
    """One of these must stand in the listing of a compiled decode kernel."""
    num_programs: int
    """Programs that fill the device once: its multiprocessors or compute units."""
