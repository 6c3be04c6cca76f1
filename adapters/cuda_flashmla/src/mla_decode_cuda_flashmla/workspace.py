"""Device memory of a problem: the builder's buffers, and the library's own in a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode.problem import LATENT_WIDTH
from mla_decode_cuda_flashmla.limits import num_sm_parts

if TYPE_CHECKING:
    from mla_decode.problem import DecodeProblem

_INT32 = _FLOAT32 = 4
_PART_INTS = 8
"""Of a work list's header in the schedule."""


def builder_bytes(problem: DecodeProblem, *, serves_empty_rows: bool) -> int:
    """What a builder holds: an empty table, and copies where empty rows are unsafe.

    Args:
        problem: Sizes the largest batch.
        serves_empty_rows: Of the library's form: `DenseDecode.serves_empty_rows`.
    """
    most, width = problem.max_num_reqs, max(problem.table_width, 1)
    total = _INT32 * most
    if not serves_empty_rows:
        total += most * (_INT32 + 1 + _INT32 * width)
    return total


def call_bytes(problem: DecodeProblem, num_sms: int) -> int:
    """What the library allocates at the largest batch, its outputs not counted.

    Its source sizes the split results for every request once and every work list once,
    whatever the lengths; the LSE is an output that callers without `needs_lse` drop.

    Args:
        problem: Sizes the largest batch.
        num_sms: Multiprocessors of the device.
    """
    requests = problem.max_num_reqs
    largest = 0
    for query_len in problem.query_lens:
        rows = query_len * problem.num_q_heads
        parts = num_sm_parts(rows, num_sms)
        split = _FLOAT32 * (requests + parts) * rows * (LATENT_WIDTH + 1)
        schedule = _INT32 * (_PART_INTS * parts + requests + 1)
        largest = max(largest, split + schedule + _FLOAT32 * requests * rows)
    return largest
