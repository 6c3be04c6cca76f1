"""The rows that one work item of a schedule holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.rules import Profile


def ceil_div(a: int, b: int) -> int:
    """A / b, rounded up."""
    return -(-a // b)


def schedule_tile_rows(
    profile: Profile, arch: str, dtypes: tuple[str, str], heads: int, q: int
) -> int:
    """Heads times tokens of one tile: 128, or 64 for some shapes of gfx950.

    Args:
        profile: The release.
        arch: `gfx942` or `gfx950`.
        dtypes: Of q and of the cache, as the schedule is told.
        heads: Heads of one folded request.
        q: Query tokens of one folded request.
    """
    if arch != "gfx950":
        return 128
    if "fp8" not in dtypes:
        narrow = profile.reduce_heads >= {48} and heads * q >= 64 and heads <= 64
        return 64 if narrow and (heads * q < 128 or heads == 48) else 128
    if dtypes == ("fp8", "fp8") and heads == 32 and q == 3:
        return 64 if profile.has_causal_argument else 128
    return 128


def loses_keys(heads: int, q: int, ratio: int) -> bool:
    """Whether a folded causal schedule trims a tile by more than its rows allow.

    The planner computes the trim of a folded request from row numbers in which the
    folded groups are mixed; for blocks of 9 and more tokens the last row of a tile may
    then miss a key (96, 112 and, where they fold, 128 heads).

    Args:
        heads: Heads of one folded request.
        q: Query tokens of a request.
        ratio: Folded requests of one request.
    """
    if ratio == 1:
        return False
    tiles = ceil_div(q * heads, 128)
    if heads * ratio * q <= 128 or tiles == 1:
        return False
    size = ceil_div(q, tiles)
    for group in range(ratio):
        for tile in range(tiles):
            first = tile * size
            last = min(first + size, q) - 1
            trim = max(tiles - ((group * q + first) // ratio) % q - 1, 0)
            if last >= first and trim > q - 1 - last:
                return True
    return False
