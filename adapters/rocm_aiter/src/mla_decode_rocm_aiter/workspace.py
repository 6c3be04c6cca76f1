"""The buffers of a builder, and what AITER allocates by itself at every call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode_rocm_aiter.sizes import CU_COUNTS, BufferSizes, buffer_sizes

if TYPE_CHECKING:
    from mla_decode import DecodeProblem
    from mla_decode_rocm_aiter.routes import Route

LARGEST_INDEX_BYTES = 1 << 31
"""AITER's kernels address the index list by 32-bit byte offsets."""
MOST_SPLITS = 16
_WORDS = BufferSizes(work_indptr=1, works=8, reduce_indptr=1, tiles=2, partials=1)
"""int32 numbers of each entry of a schedule's buffers."""
_META_WORDS = 4
"""Two addresses."""


def index_entries(problem: DecodeProblem) -> int:
    """Entries of the index list: one a token of the largest batch."""
    return problem.max_num_reqs * problem.max_model_len


def num_splits(cus: int, requests: int) -> int:
    """Splits of a request without a schedule, from the launch shape alone.

    Never one: with one split AITER takes a fast path that leaves the LSE unwritten, and
    whose kernel of 32 heads once wrote through a null pointer.
    """
    return max(2, min(MOST_SPLITS, cus // max(1, requests)))


@lru_cache(maxsize=1024)
def split_counts(cus: int, max_num_reqs: int) -> tuple[int, ...]:
    """Every number of splits that batches of up to so many requests get."""
    ends = (max(1, cus // count) for count in range(1, MOST_SPLITS + 1))
    largest = {min(max_num_reqs, requests) for requests in ends} | {max_num_reqs}
    return tuple(sorted({num_splits(cus, requests) for requests in largest}))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceBytes:
    """Device memory of a problem, part by part."""

    index: int
    """The index list: kept by the builder."""
    schedule: int
    """The six buffers of the schedule: kept by the builder."""
    padded: int
    """Query and output with padded heads: kept by the builder."""
    small: int
    """Offsets, flags and constants: kept by the builder."""
    partials: int
    """AITER's partial outputs and their LSE: allocated by AITER at every call."""
    folded: int
    """Copies of q and o that AITER makes where heads fold: at every call."""

    @property
    def kept(self) -> int:
        """What the builder holds."""
        return self.index + self.schedule + self.padded + self.small

    @property
    def passing(self) -> int:
        """What a call allocates and gives back."""
        return self.partials + self.folded


def workspace_of(
    problem: DecodeProblem, arch: str, routes: dict[tuple[int, bool], Route]
) -> WorkspaceBytes:
    """What the largest batch of a problem takes, known before a byte is allocated.

    Args:
        problem: Sizes the largest batch.
        arch: Whose compute units bound the splits.
        routes: By block length and causal.
    """
    requests, cus = problem.max_num_reqs, CU_COUNTS[arch]
    partials = folded = padded = 0
    size = 1 if problem.q_dtype == "fp8" else 2
    schedules: list[BufferSizes] = []
    num_counts = 0
    heads_in_order = next(iter(routes.values())).heads
    for (q, _), route in routes.items():
        rows, heads = requests * q, route.heads
        if route.keeps_schedule:
            dtypes = (problem.q_dtype, problem.kv_dtype)
            sizes = buffer_sizes(arch, requests, heads, q, dtypes, cus, -1)
            schedules.append(sizes)
            partials = max(partials, _scheduled_partials(route, sizes))
            if route.key.fold > 1 and q > 1:
                copies = heads * (ROW_WIDTH * size + LATENT_WIDTH * 2)
                folded = max(folded, rows * copies)
        else:
            num_counts = len(split_counts(cus, requests))
            partials = max(partials, _split_partials(route, rows, requests, cus))
        if heads != problem.num_q_heads:
            width = ROW_WIDTH * size + LATENT_WIDTH * 2
            padded = max(padded, rows * heads * width)
    return WorkspaceBytes(
        index=4 * index_entries(problem),
        schedule=_schedule_bytes(schedules),
        padded=padded,
        small=_small_bytes(problem, heads_in_order, num_counts),
        partials=partials,
        folded=folded,
    )


def partial_bytes(
    route: Route, q: int, dtypes: tuple[str, str], arch: str, requests: int
) -> int:
    """AITER's partial outputs of one block, at its largest batch."""
    cus = CU_COUNTS[arch]
    if not route.keeps_schedule:
        return _split_partials(route, requests * q, requests, cus)
    sizes = buffer_sizes(arch, requests, route.heads, q, dtypes, cus, -1)
    return _scheduled_partials(route, sizes)


def _scheduled_partials(route: Route, sizes: BufferSizes) -> int:
    row_bytes = route.key.heads * (LATENT_WIDTH + 1) * 4
    return sizes.partials * route.key.q * row_bytes


def _split_partials(route: Route, rows: int, requests: int, cus: int) -> int:
    row_bytes = route.heads * (LATENT_WIDTH + 1) * 4
    return rows * num_splits(cus, requests) * row_bytes


def _schedule_bytes(schedules: list[BufferSizes]) -> int:
    """One set of buffers, each as long as the longest schedule needs it."""
    if not schedules:
        return 0
    numbers = _META_WORDS
    for words, *lengths in zip(_WORDS, *schedules, strict=True):
        numbers += words * max(lengths)
    return 4 * numbers


def _small_bytes(problem: DecodeProblem, heads: int, num_counts: int) -> int:
    """Offsets and flags, the order of the heads, and an offset list a split count."""
    most = problem.max_num_reqs
    offsets, ones = 4 * (most + 1), 4 * most
    is_empty = most * problem.max_query_len
    behind = 2 * 4 * sum(problem.query_lens)
    splits = 4 * (most + 1) * num_counts
    return offsets + ones + is_empty + behind + 8 * heads + splits
