"""Contained runs: case families over a few workers, a death is one failed case."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from mla_decode_contract.catalogue import BY_ID
from mla_decode_contract.child import Child, Death
from mla_decode_contract.outcome import CaseResult, Failure, FailureKind, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mla_decode_contract.target import Target

MOST_WORKERS = 6
DEFAULT_TIMEOUT_S = 60.0
INTERPRETED_FACTOR = 4.0
"""An interpreter gets this many times the timeout."""
DEFAULT_BUDGET_UNITS = 4.0


def default_workers(target: Target) -> int:
    """As many as cores where tensors live on the CPU, two that share a device."""
    if not target.is_on_cpu:
        return 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return max(1, min(MOST_WORKERS, cores))


@dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """Runs cases in worker processes, each family in one of them.

    Use as a context manager, or call `close`: workers do not outlive the pool.
    """

    target: Target
    workers: int
    timeout_s: float = DEFAULT_TIMEOUT_S
    budgets: Mapping[str, float] = field(default_factory=dict)
    """Units by case id, where the default is overridden."""
    evidence: str = ""
    """The evidence word, known once a worker is prepared."""
    machine: dict[str, Any] = field(default_factory=dict)
    """What the workers run on, known once one is prepared."""
    _results: dict[str, CaseResult] = field(default_factory=dict)
    _families: deque[list[str]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _threads: list[threading.Thread] = field(default_factory=list)
    _unpreparable: dict[str, Any] | Death | None = None
    """What a worker said, or how it died, before it could run a case."""
    _is_closed: bool = False

    def start(self, case_ids: Iterable[str]) -> None:
        """Begin to run cases, a family at a time and in the catalogue's order."""
        families: dict[str, list[str]] = {}
        for case_id in case_ids:
            families.setdefault(BY_ID[case_id].family, []).append(case_id)
        self._families.extend(families.values())
        count = min(MOST_WORKERS, self.workers, len(families))
        for number in range(count):
            thread = threading.Thread(
                target=self._serve, name=f"mla-contract-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def result(self, case_id: str) -> CaseResult:
        """Wait for a case's result."""
        with self._changed:
            self._changed.wait_for(
                lambda: case_id in self._results or not self._is_alive()
            )
            found = self._results.get(case_id)
        if found is None:
            failure = Failure(
                kind=FailureKind.CONTAINMENT, message="the pool ended before the case"
            )
            found = CaseResult(case=case_id, outcome=Outcome.FAILED, failure=failure)
        return found

    def close(self) -> None:
        """Take no more cases and end the workers."""
        with self._changed:
            self._is_closed = True
            self._families.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_alive(self) -> bool:
        return not self._is_closed and any(t.is_alive() for t in self._threads)

    def _next_family(self) -> list[str] | None:
        with self._changed:
            return self._families.popleft() if self._families else None

    def _serve(self) -> None:
        child: Child | None = None
        try:
            while (family := self._next_family()) is not None:
                for case_id in family:
                    if self._is_closed:
                        return
                    child = self._run(child, case_id)
        finally:
            if child is not None:
                child.close()
            with self._changed:
                self._changed.notify_all()

    def _run(self, child: Child | None, case_id: str) -> Child | None:
        """Run one case; return the worker for the next, None where it must be new."""
        if child is None:
            child = self._prepared()
            if child is None:
                self._put(_unprepared(case_id, self._unpreparable))
                return None
        timeout_s = self.timeout_s
        if self.evidence == "interpreted":
            timeout_s *= INTERPRETED_FACTOR
        budget = self.budgets.get(case_id, DEFAULT_BUDGET_UNITS)
        answer = child.run(case_id, budget, timeout_s)
        if isinstance(answer, Death):
            child.close()
            self._put(_dead(case_id, answer))
            return None
        self._put(CaseResult.from_dict(answer))
        return child

    def _prepared(self) -> Child | None:
        """A prepared worker; None where the backend cannot be, which is tried once."""
        if self._unpreparable is not None:
            return None
        child = Child(self.target)
        hello = child.hello()
        if isinstance(hello, Death) or "error" in hello:
            child.close()
            self._unpreparable = hello
            return None
        with self._changed:
            self.evidence, self.machine = hello["evidence"], hello["machine"]
        return child

    def _put(self, result: CaseResult) -> None:
        with self._changed:
            self._results[result.case] = result
            self._changed.notify_all()


def _dead(case_id: str, death: Death) -> CaseResult:
    return CaseResult(
        case=case_id,
        outcome=Outcome.FAILED,
        failure=Failure(
            kind=FailureKind.CONTAINMENT,
            message=death.message,
            detail=death.tail,
            signal=death.signal,
        ),
    )


def _unprepared(case_id: str, hello: dict[str, Any] | Death | None) -> CaseResult:
    if isinstance(hello, Death):
        return _dead(case_id, hello)
    told = hello or {"error": "no worker was prepared", "detail": ""}
    return CaseResult(
        case=case_id,
        outcome=Outcome.FAILED,
        failure=Failure(
            kind=FailureKind.CRASH,
            message=f"the backend could not be prepared: {told['error']}",
            detail=told["detail"],
        ),
    )
