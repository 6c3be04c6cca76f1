"""The kernel that a call ends with: rows without keys get their LSE, the caller his out."""

import triton
import triton.language as tl

_LATENT = tl.constexpr(512)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["lse_from", "lse_to"],
)
def finish_kernel(
    lse_from,
    lse_to,
    out_from,
    out_to,
    num_rows,
    COPIES_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Turn +inf into -inf in float32 [num_rows], and copy [num_rows, 512] beside it.

    Grid: (num_rows / BLOCK_ROWS, rounded up). `lse_to` may be `lse_from`. Without
    `COPIES_OUT` the outputs are not touched.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    rows = first + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    lse = tl.load(lse_from + rows, mask=inside, other=0.0)
    lse = tl.where(lse == float("inf"), float("-inf"), lse)
    tl.store(lse_to + rows, lse, mask=inside)
    if COPIES_OUT:
        at = rows[:, None] * _LATENT + tl.arange(0, _LATENT)[None, :]
        out = tl.load(out_from + at, mask=inside[:, None], other=0.0)
        tl.store(out_to + at, out, mask=inside[:, None])
