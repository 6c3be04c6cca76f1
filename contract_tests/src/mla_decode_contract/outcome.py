"""What became of a case: data that travels from a worker to the report."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Outcome(str, enum.Enum):
    """How a case ended. Only PASSED and REFUSED speak for the backend."""

    PASSED = "passed"
    """The backend did what the clause demands."""
    REFUSED = "refused"
    """The feature is declared unsupported, and the typed refusal came."""
    FAILED = "failed"
    KNOWN_FAILURE = "known_failure"
    """It failed, and the known-failures file names it with reason and issue."""
    NEEDS_HARDWARE = "needs_hardware"
    """The case is of the `device` profile, and tensors live on the CPU."""
    NOT_RUN = "not_run"
    """Deselected, or the run ended before it."""

    def __str__(self) -> str:
        """The word that reports print."""
        return self.value


class FailureKind(str, enum.Enum):
    """What a failure shows. The first three are assertions of the kit."""

    VALUE = "value"
    """A number, a buffer or a property is not what the clause demands."""
    REFUSAL = "refusal"
    """A typed error is missing, of another type, or came where none is due."""
    CONTAINMENT = "containment"
    """The process ended or hung: the signal or status is in the message."""
    CRASH = "crash"
    """An exception that no assertion of the kit foresaw."""
    SKIP = "skip"
    """The case was skipped from inside, which proves nothing."""

    def __str__(self) -> str:
        """The word that reports print."""
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A numeric comparison, in units of the reference's own rounding."""

    quantity: str
    """What was compared: ``out``, ``lse``, or a case's own words."""
    units: float
    """Largest error over the rows, in units."""
    budget: float
    """Most units allowed."""
    error: float
    """The error of that row, absolute."""
    unit: float
    """The unit of that row, absolute."""
    num_q_heads: int | None = None
    """H of the batch that was compared."""
    query_len: int | None = None
    """Q of its blocks; None where they are ragged."""
    mask: str | None = None
    """``causal``, as every one-token block is called, or ``non_causal``."""

    @property
    def is_within(self) -> bool:
        """Whether the budget holds."""
        return self.units <= self.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a case failed."""

    kind: FailureKind
    message: str
    detail: str = ""
    """A traceback, or the last lines that the process wrote."""
    signal: str | None = None
    """The signal's name where one ended the process, ``TIMEOUT`` for a hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case's outcome with its evidence."""

    case: str
    outcome: Outcome
    duration_s: float = 0.0
    failure: Failure | None = None
    refusals: tuple[dict[str, str], ...] = ()
    """What a REFUSED case was told."""
    measurements: tuple[Measurement, ...] = ()
    problems: tuple[dict[str, Any], ...] = ()
    """What was drawn for the backend; the report says which."""
    notes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON."""
        plain = asdict(self)
        plain["outcome"] = self.outcome.value
        if self.failure is not None:
            plain["failure"]["kind"] = self.failure.kind.value
        for key in ("refusals", "measurements", "problems", "notes", "kernels"):
            plain[key] = list(plain[key])
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> CaseResult:
        """The inverse of `as_dict`."""
        failure = plain["failure"]
        if failure is not None:
            failure = Failure(**{**failure, "kind": FailureKind(failure["kind"])})
        return cls(
            case=plain["case"],
            outcome=Outcome(plain["outcome"]),
            duration_s=plain["duration_s"],
            failure=failure,
            refusals=tuple(plain["refusals"]),
            measurements=tuple(Measurement(**m) for m in plain["measurements"]),
            problems=tuple(plain["problems"]),
            notes=tuple(plain["notes"]),
            kernels=tuple(plain["kernels"]),
        )
