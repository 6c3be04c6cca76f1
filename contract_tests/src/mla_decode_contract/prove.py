"""Proving the kit on an author's own adapter: every wrong wrapper of it is caught."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mla_decode_contract.catalogue import CASES
from mla_decode_contract.child import Child, Death
from mla_decode_contract.clauses import Clause
from mla_decode_contract.context import DEFAULT_BUDGET_UNITS
from mla_decode_contract.mutants import MUTANTS
from mla_decode_contract.outcome import CaseResult, FailureKind, Outcome
from mla_decode_contract.pool import DEFAULT_TIMEOUT_S, default_workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_decode_contract.mutants import Mutant
    from mla_decode_contract.target import Target

ASSERTIONS = frozenset(
    {FailureKind.VALUE, FailureKind.REFUSAL, FailureKind.CONTAINMENT}
)
"""A mutant is caught by one of these; a crash or a skip catches nothing."""
ALARM_CASES = (
    "mask.one_token_is_both",
    "lengths.one_key",
    "empty.one_request",
    "reads.page_tail",
)
"""Small value cases that every seed draws anew, to look for false alarms."""
_VALUES = frozenset(
    {
        Clause.MASK,
        Clause.BLOCK,
        Clause.LENGTHS,
        Clause.SCALE,
        Clause.EMPTY,
        Clause.LSE,
        Clause.OUT,
        Clause.READS,
        Clause.HEADS,
        Clause.DTYPE,
        Clause.DCP,
    }
)
_LARGE = frozenset(
    {
        "dcp.eight_ranks",
        "dtype.fp8_long_tail",
        "heads.around_multiples",
        "heads.every_declared_power",
        "lengths.many_requests",
    }
)
ROTATED = tuple(
    case.id
    for case in CASES
    if case.clause in _VALUES
    and case.profile == "cpu"
    and case.id not in {*ALARM_CASES, *_LARGE}
)
"""The other small value cases: a seed draws the next few, in turn."""
ROTATED_A_SEED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantResult:
    """What became of one mutant."""

    name: str
    caught: bool
    by: tuple[str, ...]
    """Cases of the broken clause whose assertion failed; the first one ends it."""
    not_applicable: str | None = None
    """Why the fault cannot show on this backend."""


@dataclass(slots=True, kw_only=True, eq=False)
class Proof:
    """A proof under way: mutants over workers, then the correct backend again."""

    target: Target
    backend: str = ""
    """The backend's own name, where the target finds it as ``module:attribute``."""
    workers: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    seeds: int = 200
    names: tuple[str, ...] = tuple(MUTANTS)
    """The mutants to try."""
    evidence: str = ""
    problem: str | None = None
    """Why there is no proof: the backend could not be prepared."""
    results: dict[str, MutantResult] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)
    """``case at seed N: message`` of the correct backend."""
    baseline: dict[str, CaseResult] = field(default_factory=dict)
    """The correct backend on the cases that mutants run."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Try every mutant and every seed."""
        mutants = [MUTANTS[name] for name in self.names]
        cases = dict.fromkeys(case for m in mutants for case in _cases(m))
        jobs = [_baseline(case_id) for case_id in cases]
        self._spread(jobs)
        if self.problem is None:
            self._spread([_trial(mutant) for mutant in mutants])
            self._spread([_redraw(seed) for seed in range(1, self.seeds + 1)])

    @property
    def is_proven(self) -> bool:
        """Whether every applicable mutant was caught, without a false alarm."""
        tried = [r for r in self.results.values() if r.not_applicable is None]
        is_clean = self.problem is None and not self.alarms
        is_whole = set(self.names) <= set(self.results)
        return is_clean and is_whole and bool(tried) and all(r.caught for r in tried)

    def as_dict(self) -> dict[str, Any]:
        """The form that ``prove --json`` prints."""
        results = [self.results[name] for name in self.names if name in self.results]
        return {
            "backend": self.backend or self.target.backend,
            "arch": self.target.device.arch,
            "evidence": self.evidence or None,
            "mutants": [
                {"name": r.name, "caught": r.caught, "by": list(r.by)}
                for r in results
                if r.not_applicable is None
            ],
            "false_alarms": len(self.alarms),
            "not_applicable": [
                {"name": r.name, "reason": r.not_applicable}
                for r in results
                if r.not_applicable is not None
            ],
        }

    def ask(
        self, child: Child, case_id: str, **changes: Any
    ) -> tuple[CaseResult | None, Death | None]:
        """Run one case on a worker."""
        factor = 4.0 if self.evidence == "interpreted" else 1.0
        answer = child.run(
            case_id, DEFAULT_BUDGET_UNITS, factor * self.timeout_s, **changes
        )
        if isinstance(answer, Death):
            return None, answer
        return CaseResult.from_dict(answer), None

    def alarm(self, what: str) -> None:
        """Note that the correct backend failed."""
        with self._lock:
            self.alarms.append(what)

    def _spread(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        queue = deque(jobs)
        count = min(self.workers or default_workers(self.target), len(jobs))
        with ThreadPoolExecutor(count) as pool:
            served = [pool.submit(self._serve, queue) for _ in range(count)]
        for one in served:
            one.result()  # a job that broke breaks the proof

    def _serve(self, queue: deque[Job]) -> None:
        child: Child | None = None
        try:
            while self.problem is None:
                with self._lock:
                    job = queue.popleft() if queue else None
                if job is None:
                    break
                child = child or self._child()
                if child is not None and not job(self, child):
                    child.close()
                    child = None
        finally:
            if child is not None:
                child.close()

    def _child(self) -> Child | None:
        child = Child(self.target)
        hello = child.hello()
        if isinstance(hello, Death) or "error" in hello:
            child.close()
            said = hello.message if isinstance(hello, Death) else hello["error"]
            self.problem = f"the backend could not be prepared: {said}"
            return None
        self.evidence = hello["evidence"]
        return child


if TYPE_CHECKING:
    Job = Callable[[Proof, Child], bool]


def _cases(mutant: Mutant) -> list[str]:
    """Cases of the broken clause that run anywhere, quick ones first."""
    runnable = [case for case in mutant.cases() if case.profile == "cpu"]
    return [c.id for c in sorted(runnable, key=lambda case: not case.is_quick)]


def _baseline(case_id: str) -> Job:
    def job(proof: Proof, child: Child) -> bool:
        result, death = proof.ask(child, case_id)
        if result is not None:
            proof.baseline[case_id] = result
            if result.failure is not None:
                proof.alarm(f"{case_id}: {result.failure.message}")
        if death is not None:
            proof.alarm(f"{case_id}: {death.message}")
        return death is None

    return job


def _trial(mutant: Mutant) -> Job:
    def job(proof: Proof, child: Child) -> bool:
        usable = [
            case_id
            for case_id in _cases(mutant)
            if case_id in proof.baseline and proof.baseline[case_id].failure is None
        ]
        if not mutant.can_show(
            {i: proof.baseline[i].outcome is Outcome.PASSED for i in usable}
        ):
            proof.results[mutant.name] = MutantResult(
                name=mutant.name,
                caught=False,
                by=(),
                not_applicable=f"needs {' and '.join(sorted(mutant.needs))}, which "
                "the backend declares unsupported",
            )
            return True
        for case_id in usable:
            result, death = proof.ask(child, case_id, mutant=mutant.name)
            failure = None if result is None else result.failure
            if death is not None or (failure and failure.kind in ASSERTIONS):
                proof.results[mutant.name] = MutantResult(
                    name=mutant.name, caught=True, by=(case_id,)
                )
                return death is None
        proof.results[mutant.name] = MutantResult(name=mutant.name, caught=False, by=())
        return True

    return job


def redrawn(seed: int) -> tuple[str, ...]:
    """The cases that a seed draws anew: some always, the others in turn."""
    first = seed * ROTATED_A_SEED
    turn = range(first, first + ROTATED_A_SEED)
    return (*ALARM_CASES, *(ROTATED[n % len(ROTATED)] for n in turn))


def _redraw(seed: int) -> Job:
    def job(proof: Proof, child: Child) -> bool:
        for case_id in redrawn(seed):
            result, death = proof.ask(child, case_id, seed=seed)
            if death is not None:
                proof.alarm(f"{case_id} at seed {seed}: {death.message}")
                return False
            if result is not None and result.failure is not None:
                proof.alarm(f"{case_id} at seed {seed}: {result.failure.message}")
        return True

    return job
