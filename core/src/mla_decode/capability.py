"""What a backend declares that it can serve, as plain data with its sources."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from mla_decode.mask import Mask
from mla_decode.refusal import Refusal, RefusalCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem

IntSet = range | frozenset[int]
"""The two readable ways to say which numbers are allowed."""

PAD_WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128)
"""Head counts that rows are padded to by a lowering: the widths that MLA kernels have."""


class Support(enum.Enum):
    """Whether a feature is there, and if not, whose turn it is."""

    YES = "yes"
    HARDWARE_CANNOT = "hardware_cannot"
    NOT_IMPLEMENTED = "not_implemented"
    NEEDS_VERSION = "needs_version"


class Feature(str, enum.Enum):
    """What a problem may need beyond shapes and dtypes."""

    LSE = "lse"
    """Return the log-sum-exp of each row."""
    DCP = "dcp"
    """Serve a rank's share of the KV: one-token rows, and non-causal blocks."""
    GRAPHS = "graphs"
    """Capture and replay."""
    PAGE_STRIDE = "page_stride"
    """Pages that do not lie back to back."""
    SPLIT_CAP = "split_cap"
    """Keep to a problem's `max_splits`."""
    BATCH_INVARIANCE = "batch_invariance"
    """Give a token the same bits whatever else is in the batch."""


class Source(str, enum.Enum):
    """Where a row of a capability comes from."""

    MANIFEST = "manifest"
    """The kernel table of the installed library."""
    PROFILE = "profile"
    """Our record of a release's own dispatch code."""
    HARDWARE_REPORT = "hardware report"
    """A report of the contract kit from real hardware."""
    DECLARED = "declared"
    """The adapter's author says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityRow:
    """What a backend serves on one architecture. An absent key means unsupported."""

    arch: str
    dtypes: frozenset[tuple[str, str]]
    """Pairs of (q_dtype, kv_dtype)."""
    out_dtypes: frozenset[str]
    page_sizes: IntSet
    num_q_heads: IntSet
    query_lens: Mapping[Mask, IntSet]
    """Block lengths by mask; one-token blocks are looked up under CAUSAL."""
    features: Mapping[Feature, Support] = field(default_factory=dict)
    source: Source = Source.DECLARED
    max_num_reqs: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        """Freeze the two mappings."""
        for name in ("query_lens", "features"):
            value = MappingProxyType(dict(getattr(self, name)))
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A backend's rows, one an architecture."""

    rows: tuple[CapabilityRow, ...]

    def row(self, arch: str) -> CapabilityRow | None:
        """The row of an architecture, or None where the backend has none."""
        for row in self.rows:
            if row.arch == arch:
                return row
        return None

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures that some row names."""
        return tuple(row.arch for row in self.rows)

    def refusals(self, problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
        """Every reason why the problem is outside the rows; empty: it is inside.

        Collects all reasons, over every (query length, mask) of the problem.
        """
        row = self.row(device.arch)
        if row is None:
            return [
                _refusal(
                    RefusalCode.ARCH,
                    "No kernels for this architecture",
                    device.arch,
                    " ".join(self.archs),
                    self._arch_fix(device),
                )
            ]
        return [
            *_dtype_refusals(row, problem),
            *_shape_refusals(row, problem),
            *_block_refusals(row, problem),
            *_feature_refusals(row, problem),
        ]

    def _arch_fix(self, device: DeviceInfo) -> str:
        """What to do on an architecture without a row: no advice that may be refused."""
        if device.vendor == "cpu":
            return "use reference, or assume one of these (explain --arch NAME)"
        return (
            f"use a backend that has {device.arch} among its architectures: triton_mla "
            "and reference have the most"
        )


def describe(numbers: Iterable[object]) -> str:
    """Numbers or words for people: ``1..128``, ``16, 32``, ``bf16, fp16``."""
    if isinstance(numbers, range):
        step = f" step {numbers.step}" if numbers.step != 1 else ""
        return f"{numbers[0]}..{numbers[-1]}{step}" if len(numbers) else "none"
    items = list(numbers)
    items.sort(key=lambda item: (str(type(item)), item))
    return ", ".join(map(str, items)) or "none"


def _refusal(
    code: RefusalCode, message: str, got: object, allowed: str, fix: str
) -> Refusal:
    return Refusal(
        code=code, message=message, got=str(got), allowed=allowed or "none", fix=fix
    )


def _dtype_refusals(row: CapabilityRow, problem: DecodeProblem) -> Iterator[Refusal]:
    if (problem.q_dtype, problem.kv_dtype) not in row.dtypes:
        yield _pair_refusal(row, problem)
    if problem.out_dtype not in row.out_dtypes:
        yield _refusal(
            RefusalCode.DTYPE,
            "No kernel writes this output dtype",
            problem.out_dtype,
            describe(row.out_dtypes),
            "ask for one of these and cast the output",
        )


def _pair_refusal(row: CapabilityRow, problem: DecodeProblem) -> Refusal:
    kv_dtypes = {kv for q, kv in row.dtypes if q == problem.q_dtype}
    if not kv_dtypes:
        return _refusal(
            RefusalCode.DTYPE,
            "No kernel for this query dtype",
            problem.q_dtype,
            describe({q for q, _ in row.dtypes}),
            "cast the query, or use another backend",
        )
    return _refusal(
        RefusalCode.KV_DTYPE,
        f"No kernel for this cache dtype with a {problem.q_dtype} query",
        problem.kv_dtype,
        describe(kv_dtypes),
        "choose another cache dtype for this layer group, or another backend",
    )


def _shape_refusals(row: CapabilityRow, problem: DecodeProblem) -> Iterator[Refusal]:
    if problem.page_size not in row.page_sizes:
        yield _refusal(
            RefusalCode.PAGE_SIZE,
            "No kernel walks pages of this size",
            problem.page_size,
            describe(row.page_sizes),
            "set the cache's page size (vLLM: --block-size) to one of these",
        )
    if problem.num_q_heads not in row.num_q_heads:
        yield _refusal(
            RefusalCode.NUM_HEADS,
            "No kernel for this number of query heads",
            problem.num_q_heads,
            describe(row.num_q_heads),
            _heads_fix(row, problem.num_q_heads),
        )
    for name in ("max_num_reqs", "max_model_len"):
        limit = getattr(row, name)
        if limit is not None and getattr(problem, name) > limit:
            yield _refusal(
                RefusalCode.FEATURE,
                f"{name} is past what the backend can schedule",
                f"{name}={getattr(problem, name)}",
                f"{name} <= {limit}",
                f"lower {name}, or use another backend",
            )


def _heads_fix(row: CapabilityRow, heads: int) -> str:
    """What to do about a head count: which width it may be padded to, and its price."""
    fix = "change the tensor-parallel size, or use another backend"
    wider = (n for n in PAD_WIDTHS if n > heads and n in row.num_q_heads)
    width = next(wider, None)
    if width is None:
        return fix
    return (
        f'opt in to lowering="exact", which pads to {width} heads '
        f"({width / heads:.3g} times the rows), or {fix}"
    )


def _block_refusals(row: CapabilityRow, problem: DecodeProblem) -> Iterator[Refusal]:
    for query_len, mask in problem.blocks():
        allowed = row.query_lens.get(mask)
        if allowed is None:
            yield _refusal(
                RefusalCode.MASK,
                f"No {mask} kernel for a block of {query_len} tokens",
                mask,
                describe(row.query_lens),
                'use triton_mla, or opt in to lowering="exact"',
            )
        elif query_len not in allowed:
            yield _refusal(
                RefusalCode.QUERY_LEN,
                f"No {mask} kernel for this block length",
                query_len,
                describe(allowed),
                'use another block length or backend, or lowering="exact"',
            )


def _needed(problem: DecodeProblem) -> Iterator[tuple[Feature, RefusalCode]]:
    """Features that the problem asks for, with the code of a refusal for each."""
    if problem.needs_lse:
        yield Feature.LSE, RefusalCode.LSE
    if problem.dcp is not None:
        yield Feature.DCP, RefusalCode.DCP
    if problem.graphs:
        yield Feature.GRAPHS, RefusalCode.FEATURE
    if problem.page_stride != problem.page_size * 576:
        yield Feature.PAGE_STRIDE, RefusalCode.FEATURE
    if problem.max_splits is not None:
        yield Feature.SPLIT_CAP, RefusalCode.FEATURE
    if problem.batch_invariant:
        yield Feature.BATCH_INVARIANCE, RefusalCode.DETERMINISM


def _feature_refusals(row: CapabilityRow, problem: DecodeProblem) -> Iterator[Refusal]:
    for feature, code in _needed(problem):
        support = row.features.get(feature, Support.NOT_IMPLEMENTED)
        if support is not Support.YES:
            yield _refusal(
                code,
                f"The backend lacks {feature.value} here ({support.value})",
                feature.value,
                describe(f.value for f, s in row.features.items() if s is Support.YES),
                "do without it, or use another backend",
            )
    if problem.dcp is not None and any(
        query_len > 1 and mask is Mask.CAUSAL for query_len, mask in problem.blocks()
    ):
        yield _refusal(
            RefusalCode.DCP,
            "A causal block under DCP would be masked on rank-local indices",
            f"causal blocks of {describe(problem.query_lens)}",
            "one-token rows, each with its own local length",
            'opt in to lowering="exact", which splits the block into such rows',
        )
