"""One run inside a pytest session: what is due, what came, what it proves."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_decode import version
from mla_decode_contract.catalogue import CASES
from mla_decode_contract.identity import software
from mla_decode_contract.known_failures import Exceptions, read_exceptions
from mla_decode_contract.outcome import (
    CaseResult,
    Failure,
    FailureKind,
    Outcome,
)
from mla_decode_contract.pool import DEFAULT_TIMEOUT_S, Pool, default_workers
from mla_decode_contract.report import make_directory
from mla_decode_contract.target import (
    Target,
    UsageProblem,
    load_backend,
    resolve_device,
)
from mla_decode_contract.verdict import Verdict, judge

if TYPE_CHECKING:
    from mla_decode.backend import Backend
    from mla_decode_contract.catalogue import Case
    from mla_decode_contract.shard import Shard

REPEATED_VARIABLES = ("MLA_DECODE_SIMULATE",)
"""Of the environment: what they say belongs to the command that repeats a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the caller asked for."""

    backend: str
    arch: str | None = None
    assume_arch: str | None = None
    is_quick: bool = False
    case: str | None = None
    seed: int = 0
    report: Path | None = None
    known_failures: Path | None = None
    workers: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    mutant: str | None = None
    shard: Shard | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """A run from its settings to its verdict."""

    settings: Settings
    backend: Backend
    target: Target
    exceptions: Exceptions
    due: tuple[Case, ...]
    """Every case of the run's kind: all, or the quick ones, or a shard of these."""
    pool: Pool
    contract: str = field(default_factory=lambda: version.CONTRACT_VERSION)
    """Core's; it decides which cases are provisional."""
    results: dict[str, CaseResult] = field(default_factory=dict)
    evidence: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    finished_at: float | None = None
    _is_started: bool = False

    @classmethod
    def prepare(cls, settings: Settings) -> Run:
        """Resolve the settings; nothing of the backend's kernels is loaded.

        Raises:
            UsageProblem: They name something that does not exist or cannot be run.
        """
        backend = load_backend(settings.backend)
        device = resolve_device(
            backend, arch=settings.arch, assume_arch=settings.assume_arch
        )
        target = Target(
            backend=settings.backend,
            device=device,
            seed=settings.seed,
            mutant=settings.mutant,
        )
        exceptions = Exceptions()
        if settings.known_failures is not None:
            exceptions = read_exceptions(settings.known_failures)
        if settings.case is not None and settings.case not in {c.id for c in CASES}:
            raise UsageProblem(f"no case is named {settings.case!r}; see `list`")
        if settings.case is not None and settings.shard is not None:
            raise UsageProblem("--case and --shard exclude each other")
        if settings.mutant is not None:
            _require_mutant(settings.mutant)
        if settings.report is not None:
            make_directory(settings.report)
        pool = Pool(
            target=target,
            workers=settings.workers or default_workers(target),
            timeout_s=settings.timeout_s,
            budgets=exceptions.budgets,
        )
        return cls(
            settings=settings,
            backend=backend,
            target=target,
            exceptions=exceptions,
            due=due_cases(is_quick=settings.is_quick, shard=settings.shard),
            pool=pool,
        )

    @property
    def selected(self) -> tuple[Case, ...]:
        """The cases that the settings select from all."""
        if self.settings.case is None:
            return self.due
        return tuple(case for case in CASES if case.id == self.settings.case)

    def start(self, case_ids: list[str]) -> None:
        """Begin to run the selected cases that can run here, once."""
        if not self._is_started:
            self._is_started = True
            runnable = {c.id for c in CASES if self.can_run(c)}
            self.pool.start([c for c in case_ids if c in runnable])

    def can_run(self, case: Case) -> bool:
        """Whether the case's profile is one that this run has."""
        return case.profile == "cpu" or self.target.profile == "device"

    def outcome_of(self, case: Case) -> CaseResult:
        """Wait for a case, then hold it against the known failures."""
        if not self.can_run(case):
            return CaseResult(
                case=case.id,
                outcome=Outcome.NEEDS_HARDWARE,
                notes=("runs on the device itself only",),
            )
        return self._hold_to_word(self.pool.result(case.id))

    def _hold_to_word(self, result: CaseResult) -> CaseResult:
        known = self.exceptions.known(result.case)
        if known is None:
            return result
        plain = result.as_dict()
        note = f"known failure: {known.reason} ({known.issue})"
        plain["notes"] = [*plain["notes"], note]
        if result.outcome is Outcome.FAILED:
            plain["outcome"] = Outcome.KNOWN_FAILURE.value
            return CaseResult.from_dict(plain)
        plain["outcome"] = Outcome.FAILED.value
        failure = Failure(
            kind=FailureKind.VALUE,
            message=f"a known failure {result.outcome}: remove its entry "
            f"({known.reason}, {known.issue})",
        )
        return CaseResult.from_dict(
            {**plain, "failure": {**_plain(failure)}, "refusals": []}
        )

    def record(self, result: CaseResult) -> None:
        """Keep a result; of several for one case the worst stays."""
        known = self.results.get(result.case)
        if known is None or known.outcome is not Outcome.FAILED:
            self.results[result.case] = result

    def all_results(self) -> dict[str, CaseResult]:
        """One result for each case that was due, in the catalogue's order."""
        ids = {case.id for case in self.due} | set(self.results)
        return {
            case.id: self.results.get(case.id)
            or CaseResult(case=case.id, outcome=Outcome.NOT_RUN)
            for case in CASES
            if case.id in ids
        }

    def verdict(self) -> Verdict:
        """What the run proves."""
        results = self.all_results()
        return judge(
            results,
            evidence=self.evidence or self.pool.evidence,
            profile=self.target.profile,
            is_quick=self.settings.is_quick,
            provisional=provisional_ids(self.contract),
            shard=self.settings.shard,
        )

    def software(self) -> dict[str, Any]:
        """Versions of the contract, the kit, core and the adapter."""
        return software(self.settings.backend, self.backend)

    def finish(self) -> None:
        """End the workers and stop the clock."""
        self.pool.close()
        self.evidence = self.evidence or self.pool.evidence
        self.machine = self.machine or self.pool.machine
        self.finished_at = time.time()

    def command(self, case_id: str) -> str:
        """The one command that repeats a case, as a POSIX shell reads it."""
        settings, device = self.settings, self.target.device
        given = [
            f"{name}={os.environ[name]}"
            for name in REPEATED_VARIABLES
            if os.environ.get(name)
        ]
        words = [*given, "mla-decode-contract", "run", settings.backend]
        is_assumed = device.assumed or settings.assume_arch is not None
        words += ["--assume-arch" if is_assumed else "--arch", device.arch]
        words += ["--case", case_id, "--seed", str(settings.seed)]
        if settings.mutant is not None:
            words += ["--mutant", settings.mutant]
        if settings.timeout_s != DEFAULT_TIMEOUT_S:
            words += ["--timeout-s", f"{settings.timeout_s:g}"]
        if settings.known_failures is not None and self.exceptions.names(case_id):
            words += ["--known-failures", _from_here(settings.known_failures)]
        return " ".join(map(_quoted, words))


def due_cases(*, is_quick: bool, shard: Shard | None = None) -> tuple[Case, ...]:
    """The cases of a kind of run: all, or the quick ones, or a shard of these."""
    kind = tuple(case for case in CASES if case.is_quick or not is_quick)
    return kind if shard is None else shard.part(kind)


def provisional_ids(contract: str) -> frozenset[str]:
    """The cases that a contract reports and does not count."""
    return frozenset(case.id for case in CASES if case.is_provisional(contract))


def _quoted(word: str) -> str:
    """A word for the shell; an assignment stays one."""
    name, equals, value = word.partition("=")
    if equals and name in REPEATED_VARIABLES:
        return f"{name}={shlex.quote(value)}"
    return shlex.quote(word)


def _from_here(path: Path) -> str:
    """A path relative to the working directory where it lies inside."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _require_mutant(name: str) -> None:
    from mla_decode_contract.mutants import MUTANTS  # noqa: PLC0415 - needs torch

    if name not in MUTANTS:
        known = ", ".join(MUTANTS)
        raise UsageProblem(f"no mutant is named {name!r}; known: {known}")


def _plain(failure: Failure) -> dict[str, Any]:
    return {
        "kind": failure.kind.value,
        "message": failure.message,
        "detail": failure.detail,
        "signal": failure.signal,
    }
