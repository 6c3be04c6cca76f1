"""Sizes of the schedule's buffers, as `get_mla_metadata_info_v1` gives them."""

from __future__ import annotations

from typing import NamedTuple

from mla_decode_rocm_aiter.tiling import ceil_div

CU_COUNTS = {"gfx942": 304, "gfx950": 256}
"""Compute units of an MI300X and an MI355X."""


class BufferSizes(NamedTuple):
    """Lengths of the buffers, all int32."""

    work_indptr: int
    works: int
    reduce_indptr: int
    tiles: int
    partials: int


def tiles_per_request(arch: str, heads: int, q: int, dtypes: tuple[str, str]) -> int:
    """The most query tiles that the sizing rule of 0.1.20 expects of one request."""
    rows = heads * q
    is_bf16_950 = arch == "gfx950" and dtypes == ("bf16", "bf16")
    is_fp8 = dtypes == ("fp8", "fp8")
    small = (
        is_bf16_950 and rows >= 64 and heads <= 64 and (rows < 128 or heads == 48)
    ) or (arch == "gfx950" and is_fp8 and heads == 32 and q == 3)
    if small:
        return q if heads * 2 > 64 else ceil_div(rows, 64)
    packed = (
        heads == 16
        or (arch == "gfx942" and heads == 128 and is_fp8)
        or (
            arch == "gfx950"
            and is_fp8
            and ((heads == 32 and q == 4) or heads in {64, 128})
        )
        or (heads == 64 and is_fp8 and q == 1)
    )
    if packed:
        return ceil_div(rows, 128)
    if is_bf16_950 and (rows >= 128 or heads > 64) and heads != 48:
        return q if heads * 2 > 128 else ceil_div(rows, 128)
    return ceil_div(rows, 16)


def buffer_sizes(
    arch: str,
    batch: int,
    heads: int,
    q: int,
    dtypes: tuple[str, str],
    cus: int,
    max_split_per_batch: int,
) -> BufferSizes:
    """Buffer lengths for the largest batch that a schedule may be asked for."""
    per_request = tiles_per_request(arch, heads, q, dtypes)
    tiles = batch * per_request
    partials = min(batch + cus - 1, (cus - 1) * 2) * per_request
    if max_split_per_batch > 0:
        cap = min(cus, max_split_per_batch * batch)
        partials = max(partials, tiles + cap)
    return BufferSizes(
        work_indptr=cus + 1,
        works=(batch + cus - 1) * per_request,
        reduce_indptr=tiles + 1,
        tiles=tiles,
        partials=partials,
    )
