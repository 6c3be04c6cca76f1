"""What a case is given: the backend, a device, and problems inside the capability."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.mask import Mask
from mla_decode.problem import ROW_WIDTH, DecodeProblem
from mla_decode_contract.hook import NamesKernels
from mla_decode_contract.violations import DeclaredUnsupported, RefusalViolation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode.backend import Backend
    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.capability import CapabilityRow, IntSet
    from mla_decode.device import DeviceInfo
    from mla_decode.refusal import Refusal
    from mla_decode_contract.outcome import Measurement

DEFAULT_BUDGET_UNITS = 4.0
"""Errors may be this many times the same-dtype reference's own."""

_HEADS = (16, 8, 32, 4, 64, 128, 2, 1)
_PAGES = (16, 64, 1, 32, 128, 256)
_DTYPES = (
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
    ("fp8", "fp8"),
    ("bf16", "fp8"),
)
_CODES: dict[str, frozenset[str]] = {
    "num_q_heads": frozenset({"num_heads"}),
    "page_size": frozenset({"page_size"}),
    "query_lens": frozenset({"query_len", "mask"}),
    "masks": frozenset({"mask", "query_len", "version"}),
    "dtypes": frozenset({"dtype", "kv_dtype"}),
    "out_dtype": frozenset({"dtype"}),
    "needs_lse": frozenset({"lse"}),
    "dcp": frozenset({"dcp", "lse", "mask", "feature"}),
    "graphs": frozenset({"feature"}),
    "gap_rows": frozenset({"feature"}),
    "batch_invariant": frozenset({"determinism"}),
    "max_num_reqs": frozenset({"feature"}),
    "max_model_len": frozenset({"feature"}),
}
_LIBRARY = frozenset({"dependency", "version"})
"""What a backend says where its row has a kernel and the installed library has not."""
_FEATURES = frozenset(
    {
        "query_lens",
        "masks",
        "needs_lse",
        "dcp",
        "graphs",
        "gap_rows",
        "batch_invariant",
    }
)


@dataclass(slots=True, kw_only=True, eq=False)
class CaseContext:
    """One case's view of the backend, and the place where it leaves its evidence."""

    case_id: str
    backend: Backend
    device: DeviceInfo
    backend_spec: str = "reference"
    """How the backend is found: an entry point's name, or ``module:attribute``."""
    seed: int = 0
    budget_units: float = DEFAULT_BUDGET_UNITS
    measurements: list[Measurement] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    """Addresses of the memory of queries and caches that the backend was given."""
    generator: torch.Generator = field(init=False)
    """On the CPU, seeded by the run's seed and the case's id."""

    def __post_init__(self) -> None:
        """Seed the generator."""
        self.generator = torch.Generator()
        self.generator.manual_seed(
            (zlib.crc32(self.case_id.encode()) << 20) + self.seed
        )

    @property
    def row(self) -> CapabilityRow:
        """The declared row of the device's architecture."""
        row = self.backend.capability.row(self.device.arch)
        if row is None:
            raise RefusalViolation(f"no capability row for {self.device.arch}")
        return row

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        return torch.device(self.device.torch_device)

    def refusals(self, problem: DecodeProblem) -> list[Refusal]:
        """The backend's own answer for a problem on the run's device."""
        return list(self.backend.refusals(problem, self.device))

    def problem(self, **must: Any) -> DecodeProblem:
        """Draw a problem that the backend accepts and that has what the case needs.

        Args:
            must: Fields of `DecodeProblem` (``dtypes`` for the pair, ``gap_rows`` for
                rows between pages). What is left out is free: it is taken from a list
                of preferences, inside the declared row.

        Raises:
            DeclaredUnsupported: No such problem is accepted: a refusal is due.
            RefusalViolation: The row declares it, yet every such problem is refused;
                or the backend accepts nothing at all.
        """
        declared, absent = False, None
        for problem in self._candidates(must):
            if self.backend.capability.refusals(problem, self.device):
                continue
            reasons = {str(reason.code) for reason in self.refusals(problem)}
            if not reasons:
                self.problems.append(problem.as_dict())
                return problem
            declared = True
            if reasons <= _LIBRARY and absent is None:
                absent = problem
        base = self._accepted_base()
        if absent is not None:
            self.notes.append("declared, but not in the installed library")
            raise DeclaredUnsupported(absent, _LIBRARY)
        if declared and must and set(must) <= _FEATURES:
            raise RefusalViolation(
                f"the capability row declares {_words(must)}, yet `refusals` refuses "
                "every head count, page size and dtype of the row with it"
            )
        codes: frozenset[str] = frozenset().union(*(_CODES[key] for key in must))
        raise DeclaredUnsupported(_with(base, must), codes)

    def _accepted_base(self) -> DecodeProblem:
        """The plainest problem that the backend accepts."""
        rows = self.backend.capability
        inside = (p for p in self._candidates({}) if not rows.refusals(p, self.device))
        base = next((p for p in inside if not self.refusals(p)), None)
        if base is None:
            first = next(self._candidates({}))
            raise RefusalViolation(
                f"no problem is accepted on {self.device.arch}; the plainest one: "
                + "; ".join(map(str, self.refusals(first)))
            )
        return base

    def builder(
        self, problem: DecodeProblem, **kwargs: Any
    ) -> MLADecodeMetadataBuilder:
        """A new builder of the backend, for a problem that it accepts."""
        if isinstance(self.backend, NamesKernels) and not self.kernels:
            self.kernels.extend(self.backend.kernel_names(problem, self.device))
        return self.backend.builder_cls(problem, self.device, **kwargs)

    def numbers(self, allowed: IntSet, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The wanted numbers that are declared, then the least and most declared."""
        ends = (least(allowed), most(allowed)) if len(allowed) else ()
        found = [number for number in wanted if number in allowed]
        return tuple(dict.fromkeys((*found, *ends)))

    def _candidates(self, must: dict[str, Any]) -> Iterator[DecodeProblem]:
        row = self.row
        heads = _one_or(must, "num_q_heads", self.numbers(row.num_q_heads, _HEADS))
        pages = _one_or(must, "page_size", self.numbers(row.page_sizes, _PAGES))
        known = [pair for pair in _DTYPES if pair in row.dtypes]
        dtypes = _one_or(must, "dtypes", known + sorted(row.dtypes - set(known)))
        lse = _one_or(must, "needs_lse", (True, False))
        fixed = {
            key: value
            for key, value in must.items()
            if key not in {"num_q_heads", "page_size", "dtypes", "needs_lse"}
        }
        for pair, count, size, wants in itertools.product(dtypes, heads, pages, lse):
            out = "bf16" if pair[0] == "fp8" else pair[0]
            if out not in row.out_dtypes:
                out = min(row.out_dtypes)
            yield _with(
                DecodeProblem(
                    num_q_heads=count,
                    q_dtype=pair[0],
                    kv_dtype=pair[1],
                    out_dtype=out,
                    page_size=size,
                    needs_lse=wants,
                    max_num_reqs=8,
                    max_model_len=512,
                ),
                fixed,
            )


def least(allowed: IntSet) -> int:
    """The least declared number; a range may be long, so it is not walked."""
    if isinstance(allowed, range):
        return min(allowed[0], allowed[-1])
    return min(allowed)


def most(allowed: IntSet) -> int:
    """The largest declared number."""
    if isinstance(allowed, range):
        return max(allowed[0], allowed[-1])
    return max(allowed)


def _one_or(must: dict[str, Any], key: str, free: Any) -> Any:
    return (must[key],) if key in must else free


def _with(problem: DecodeProblem, must: dict[str, Any]) -> DecodeProblem:
    changes = dict(must)
    pair = changes.pop("dtypes", None)
    if pair is not None:
        changes["q_dtype"], changes["kv_dtype"] = pair
    gap = changes.pop("gap_rows", None)
    if gap is not None:
        page_size = changes.get("page_size", problem.page_size)
        changes["kv_page_stride"] = (page_size + gap) * ROW_WIDTH
    for key in ("query_lens", "masks"):
        if key in changes:
            changes[key] = frozenset(changes[key])
    return replace(problem, **changes)


def _words(must: dict[str, Any]) -> str:
    def word(value: Any) -> str:
        if isinstance(value, (tuple, frozenset, set)):
            return "/".join(sorted(map(word, value)))
        return value.value if isinstance(value, Mask) else str(value)

    return ", ".join(f"{key}={word(value)}" for key, value in must.items())
