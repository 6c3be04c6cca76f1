"""How often a call walks a request's KV: the number that the planner ranks by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode_rocm_aiter.tiling import ceil_div, schedule_tile_rows

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.keys import KernelKey
    from mla_decode_rocm_aiter.rules import Profile


def kv_walks(
    profile: Profile,
    arch: str,
    dtypes: tuple[str, str],
    key: KernelKey,
    *,
    persistent: bool,
) -> int:
    """Passes over one request's KV.

    With a schedule each folded group of heads, and each tile of query rows within it,
    is a work item that walks on its own. Without one, each workgroup along the rows is.
    """
    if not persistent:
        return ceil_div(key.heads * key.q, _workgroup_rows(dtypes, key))
    groups = key.fold if key.q_per_call == key.q else 1
    rows = schedule_tile_rows(profile, arch, dtypes, key.heads, key.q)
    return groups * query_tiles(key, rows, call_heads=key.heads * groups)


def query_tiles(key: KernelKey, tile_rows: int, *, call_heads: int) -> int:
    """Tiles of one folded request, as the planner cuts them."""
    if key.q * call_heads <= tile_rows:
        return 1
    if 2 * key.heads > tile_rows:
        return key.q
    return ceil_div(key.q * key.heads, tile_rows)


def _workgroup_rows(dtypes: tuple[str, str], key: KernelKey) -> int:
    """Heads times tokens that one workgroup without a schedule takes."""
    if dtypes[0] == "bf16":
        if key.heads == 16 and key.q == 1:
            return 16
        if key.heads in {32, 64}:
            return 64
        return 128
    if key.heads == 16 and key.q in {3, 4}:
        return 64
    return 128
