"""How the schedule's host side folds heads, and the rows that one tile holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.rules import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFold:
    """What the planner sees of a call's heads."""

    heads: int
    """Heads of one folded request."""
    ratio: int
    """Folded requests of one request."""
    into_query: int
    """By how much a request's query tokens grow."""


def fold_for_schedule(
    profile: Profile, arch: str, dtypes: tuple[str, str], heads: int, q: int
) -> HostFold | None:
    """Fold as the C++ side of the schedule does; None where it ends the call.

    The schedule's side knows no mask, and of dtypes only whether they are fp8.
    """
    q_dtype, kv_dtype = ("fp8" if dtype == "fp8" else "bf16" for dtype in dtypes)
    fixed = (arch, (q_dtype, kv_dtype), True, True)
    if any(w.fits(*fixed) and w.admits(heads, q) for w in profile.native):
        return HostFold(heads=heads, ratio=1, into_query=1)
    for fold in profile.folds:
        where = fold.where
        if where.causal is False:
            applies = where.fits(*fixed[:3], False)
        else:
            applies = where.fits(*fixed)
        if applies and where.admits(heads, q):
            groups = heads // fold.to_heads
            return HostFold(
                heads=fold.to_heads,
                ratio=1 if fold.into_query else groups,
                into_query=groups if fold.into_query else 1,
            )
    if heads % 16 == 0:
        return HostFold(heads=16, ratio=heads // 16, into_query=1)
    return None
