"""The part of the plugin that a run registers: gathers results, writes reports."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mla_decode_contract.items import PROPERTY, CaseItem
from mla_decode_contract.outcome import CaseResult, Outcome
from mla_decode_contract.pool import DEFAULT_TIMEOUT_S
from mla_decode_contract.report import as_report, write_reports
from mla_decode_contract.session import Settings
from mla_decode_contract.shard import Shard
from mla_decode_contract.summary import plain_lines
from mla_decode_contract.verdict import EXIT_CONFORMANT

if TYPE_CHECKING:
    from mla_decode_contract.session import Run

_MACHINE = "mla_decode_contract_machine"


def settings_of(config: pytest.Config, backend: str) -> Settings:
    """The run's settings from the session's options.

    Raises:
        UsageProblem: One of them cannot be read.
    """
    option = config.getoption
    shard = option("--mla-shard")
    return Settings(
        backend=backend,
        arch=option("--mla-arch"),
        assume_arch=option("--mla-assume-arch"),
        is_quick=option("--mla-quick"),
        case=option("--mla-case"),
        seed=option("--mla-seed"),
        report=option("--mla-report"),
        known_failures=option("--mla-known-failures"),
        workers=option("--mla-workers"),
        timeout_s=option("--mla-timeout-s") or DEFAULT_TIMEOUT_S,
        mutant=option("--mla-mutant"),
        shard=None if shard is None else Shard.parse(shard),
    )


class Host:
    """A session's hooks while a run is on."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        self._config = config
        self._run = run
        self._is_controller = not hasattr(config, "workerinput")

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Start the workers on every case that is left after selection."""
        is_distributed = getattr(self._config.option, "dist", "no") != "no"
        if self._config.option.collectonly or is_distributed:
            return
        items = [item for item in session.items if isinstance(item, CaseItem)]
        self._run.start([item.case.id for item in items])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Let a report carry what the workers say of themselves."""
        report = yield
        if isinstance(item, CaseItem) and report.when == "call":
            machine = {
                "evidence": self._run.pool.evidence,
                "machine": self._run.pool.machine,
            }
            report.user_properties.append((_MACHINE, json.dumps(machine)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather results, from this process or xdist's workers."""
        for name, value in report.user_properties:
            if name == PROPERTY and report.when == "call":
                self._run.record(CaseResult.from_dict(json.loads(str(value))))
            if name == _MACHINE:
                told = json.loads(str(value))
                self._run.evidence = self._run.evidence or told["evidence"]
                self._run.machine = self._run.machine or told["machine"]

    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, str] | None:
        """Count refusals apart from passes."""
        if report.when != "call" or not report.passed:
            return None
        for name, value in report.user_properties:
            if name == PROPERTY:
                outcome = json.loads(str(value))["outcome"]
                if outcome == Outcome.REFUSED.value:
                    return "refused", "r", "REFUSED"
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End the workers, judge, write the reports, set the exit status."""
        self._run.finish()
        if not self._is_controller:
            return
        verdict = self._run.verdict()
        if self._run.settings.report is not None:
            write_reports(as_report(self._run), self._run.settings.report)
        is_fine = int(session.exitstatus) in {
            int(pytest.ExitCode.OK),
            int(pytest.ExitCode.NO_TESTS_COLLECTED),
        }
        if is_fine and verdict.exit_code != EXIT_CONFORMANT:
            session.exitstatus = verdict.exit_code

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Say what the run proves."""
        if self._config.option.collectonly or not self._is_controller:
            return
        terminalreporter.section("mla-decode contract")
        for line in plain_lines(as_report(self._run)):
            terminalreporter.write_line(line)
