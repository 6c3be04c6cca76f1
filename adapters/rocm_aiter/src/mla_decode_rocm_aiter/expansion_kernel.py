"""The page expansion as a Triton kernel: one program per request and 1024 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode_rocm_aiter.expansion import RowUnits

CHUNK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # Triton's decorator has no types
def expand_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201 - Triton's values have no Python types
    table,  # noqa: ANN001 - as above
    row_stride,  # noqa: ANN001 - as above
    column_stride,  # noqa: ANN001 - as above
    indptr,  # noqa: ANN001 - as above
    out,  # noqa: ANN001 - as above
    page_size,  # noqa: ANN001 - as above
    per_page,  # noqa: ANN001 - as above
    per_token,  # noqa: ANN001 - as above
    chunk: tl.constexpr,
):
    """Write the rows of one request's chunk of tokens."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(indptr + request).to(tl.int64)
    length = tl.load(indptr + request + 1) - start
    tokens = tl.program_id(1).to(tl.int64) * chunk + tl.arange(0, chunk)
    inside = tokens < length
    slots = table + request * row_stride + tokens // page_size * column_stride
    pages = tl.load(slots, mask=inside, other=0).to(tl.int64)
    rows = pages * per_page + tokens % page_size * per_token
    tl.store(out + start + tokens, rows.to(tl.int32), mask=inside)


def launch_expansion(
    block_table: Tensor,
    indptr: Tensor,
    out: Tensor,
    max_seq_len: int,
    page_size: int,
    units: RowUnits,
) -> None:
    """Launch over (requests, chunks of the longest request that there may be)."""
    grid = (block_table.shape[0], max(1, triton.cdiv(max_seq_len, CHUNK)))
    expand_kernel[grid](
        block_table,
        block_table.stride(0),
        block_table.stride(1),
        indptr,
        out,
        page_size,
        units.per_page,
        units.per_token,
        chunk=CHUNK,
    )
