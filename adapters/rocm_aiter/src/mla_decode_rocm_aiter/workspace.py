"""The buffers of a builder, and what AITER allocates by itself at every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode_rocm_aiter.sizes import CU_COUNTS, buffer_sizes

if TYPE_CHECKING:
    from mla_decode import DecodeProblem
    from mla_decode_rocm_aiter.routes import Route

LARGEST_INDEX_BYTES = 1 << 31
"""AITER's kernels address the index list by 32-bit byte offsets."""
MOST_SPLITS = 16


def index_entries(problem: DecodeProblem) -> int:
    """Entries of the index list: one a token of the largest batch."""
    return problem.max_num_reqs * problem.max_model_len


def num_splits(cus: int, requests: int) -> int:
    """Splits of a request without a schedule, from the launch shape alone.

    Never one: with one split AITER takes a fast path that leaves the LSE unwritten, and
    whose kernel of 32 heads once wrote through a null pointer.
    """
    return max(2, min(MOST_SPLITS, cus // max(1, requests)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceBytes:
    """Device memory of a problem, part by part."""

    index: int
    """The index list: kept by the builder."""
    schedule: int
    """The six buffers of the schedule: kept by the builder."""
    padded: int
    """Query and output with padded heads: kept by the builder."""
    partials: int
    """AITER's partial outputs and their LSE: allocated by AITER at every call."""
    folded: int
    """Copies of q and o that AITER makes where heads fold: at every call."""

    @property
    def total(self) -> int:
        """All of it together."""
        return self.index + self.schedule + self.padded + self.partials + self.folded


def workspace_of(
    problem: DecodeProblem, arch: str, routes: dict[tuple[int, bool], Route]
) -> WorkspaceBytes:
    """What the largest batch of a problem takes, known before a byte is allocated.

    Args:
        problem: Sizes the largest batch.
        arch: Whose compute units bound the splits.
        routes: By block length and causal.
    """
    requests = problem.max_num_reqs
    cus = CU_COUNTS[arch]
    schedule = partials = folded = padded = 0
    for (q, _), route in routes.items():
        rows = requests * q
        heads = route.heads
        row_bytes = heads * (LATENT_WIDTH + 1) * 4
        if route.keeps_schedule:
            sizes = buffer_sizes(
                arch,
                requests,
                heads,
                q,
                (problem.q_dtype, problem.kv_dtype),
                cus,
                -1,
            )
            words = sizes.work_indptr + 8 * sizes.works + sizes.reduce_indptr
            words += 2 * sizes.tiles + sizes.partials + 4
            schedule = max(schedule, 4 * words)
            fold_bytes = route.key.heads * (LATENT_WIDTH + 1) * 4
            partials = max(partials, sizes.partials * route.key.q * fold_bytes)
            if route.key.fold > 1 and q > 1:
                size = 1 if problem.q_dtype == "fp8" else 2
                copies = heads * (ROW_WIDTH * size + LATENT_WIDTH * 2)
                folded = max(folded, rows * copies)
        else:
            partials = max(partials, rows * num_splits(cus, requests) * row_bytes)
        if heads != problem.num_q_heads:
            size = 1 if problem.q_dtype == "fp8" else 2
            width = ROW_WIDTH * size + LATENT_WIDTH * 2
            padded = max(padded, rows * heads * width)
    return WorkspaceBytes(
        index=4 * index_entries(problem),
        schedule=schedule,
        padded=padded,
        partials=partials,
        folded=folded,
    )
