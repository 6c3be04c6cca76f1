"""Cases as pytest items: each waits for its result from the pool."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mla_decode_contract.outcome import FailureKind, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mla_decode_contract.catalogue import Case
    from mla_decode_contract.outcome import CaseResult
    from mla_decode_contract.session import Run

PROPERTY = "mla_decode_contract"
"""The user property that carries a result, across xdist's processes too."""


class CaseFailed(Exception):  # noqa: N818 - pytest shows the name
    """A case failed; the result says how."""

    def __init__(self, case: Case, result: CaseResult, command: str) -> None:
        super().__init__(result.case)
        self.case = case
        self.result = result
        self.command = command

    def __str__(self) -> str:
        failure = self.result.failure
        if failure is None:
            return self.result.case
        lines = [f"demands: {self.case.purpose}", f"[{failure.kind}] {failure.message}"]
        # Below a wrong value lies the kit alone; the report keeps its frames.
        if failure.detail and failure.kind is not FailureKind.VALUE:
            lines.append(failure.detail.rstrip())
        return "\n".join([*lines, f"repeat: {self.command}"])


class SuiteFile(pytest.File):
    """The suite's file: one item a case."""

    run: Run

    @classmethod
    def of(cls, parent: pytest.Collector, *, path: Path, run: Run) -> SuiteFile:
        """The file of a run."""
        made: SuiteFile = cls.from_parent(parent, path=path)
        made.run = run
        return made

    def collect(self) -> Iterator[pytest.Item]:
        """The cases that the run's settings select."""
        for case in self.run.selected:
            yield CaseItem.of(self, case=case, run=self.run)


class CaseItem(pytest.Item):
    """One case."""

    case: Case
    run: Run

    @classmethod
    def of(cls, parent: SuiteFile, *, case: Case, run: Run) -> CaseItem:
        """The item of a case."""
        made: CaseItem = cls.from_parent(parent, name=case.id)
        made.case, made.run = case, run
        return made

    def runtest(self) -> None:
        """Wait for the case and report it as it is."""
        self.run.start([self.case.id])
        result = self.run.outcome_of(self.case)
        self.user_properties.append((PROPERTY, json.dumps(result.as_dict())))
        if result.outcome is Outcome.FAILED:
            failed = CaseFailed(self.case, result, self.run.command(self.case.id))
            if self.case.is_provisional(self.run.contract):
                pytest.xfail(f"provisional: {failed}")
            raise failed
        if result.outcome is Outcome.KNOWN_FAILURE:
            pytest.xfail("; ".join(result.notes[-1:]))
        if result.outcome is Outcome.NEEDS_HARDWARE:
            pytest.skip("needs the hardware itself")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:  # type: ignore[override] # pytest declares a narrower result than it accepts
        """The failure without the kit's own frames."""
        if isinstance(excinfo.value, CaseFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where pytest says that the case is."""
        return self.path, None, f"{self.case.clause}: {self.case.id}"
