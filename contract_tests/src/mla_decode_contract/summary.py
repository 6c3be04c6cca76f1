"""A run for people: the verdict, what failed and how to repeat it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode_contract.catalogue import BY_ID
from mla_decode_contract.outcome import Outcome
from mla_decode_contract.verdict import EXIT_INCOMPLETE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode_contract.outcome import CaseResult
    from mla_decode_contract.session import Run

_MOST_NAMED = 12


def first_line(run: Run) -> str:
    """Who was tested on what, with the evidence word."""
    versions = run.software()
    adapter, device = versions["adapter"], run.target.device
    name = f"{adapter['backend']} {adapter['version'] or ''}".rstrip()
    where = f"{device.arch}{' (assumed)' if device.assumed else ''}"
    mutant = f" with the mutant {run.target.mutant}" if run.target.mutant else ""
    return (
        f"{run.evidence or 'nothing ran'}: {name}{mutant} on {where}, contract "
        f"{versions['contract']['core']}, kit {versions['kit']['version']}, "
        f"profile {run.target.profile}, seed {run.target.seed}"
    )


def plain_lines(run: Run) -> Iterator[str]:
    """The summary: a line a case, then what needs a reader's eye, then the verdict."""
    yield first_line(run)
    results = run.all_results()
    for case_id, result in results.items():
        if result.outcome is not Outcome.NOT_RUN:
            word = result.outcome.value.replace("_", " ")
            yield (
                f"{word:15}{case_id:42}{units_text(result):>22}"
                f"{result.duration_s:8.2f} s"
            )
    for result in results.values():
        if result.outcome in {Outcome.FAILED, Outcome.KNOWN_FAILURE}:
            yield from _failure_lines(run, result)
    yield from _exception_lines(run)
    verdict = run.verdict()
    yield ", ".join(
        f"{count} {word.replace('_', ' ')}"
        for word, count in verdict.counts.items()
        if count
    )
    if verdict.exit_code == EXIT_INCOMPLETE:
        named = ", ".join(verdict.not_run[:_MOST_NAMED])
        more = len(verdict.not_run) - _MOST_NAMED
        yield f"not run: {named}{f' and {more} more' if more > 0 else ''}"
    yield f"verdict: {verdict.word}"


def units_text(result: CaseResult) -> str:
    """The worst measurement: ``1.02 of 4 units``."""
    if not result.measurements:
        return ""
    worst = max(result.measurements, key=lambda m: m.units / m.budget)
    return f"{worst.units:.3g} of {worst.budget:g} units"


def _failure_lines(run: Run, result: CaseResult) -> Iterator[str]:
    failure = result.failure
    case = BY_ID[result.case]
    head = "FAILED" if result.outcome is Outcome.FAILED else "known failure"
    if failure is not None:
        yield f"{head} {case.clause} {case.id}: [{failure.kind}] {failure.message}"
    if result.outcome is Outcome.FAILED:
        yield f"  repeat: {run.command(result.case)}"


def _exception_lines(run: Run) -> Iterator[str]:
    for override in run.exceptions.tolerances:
        yield (
            f"tolerance of {override.case}: {override.units:g} units ({override.reason})"
        )
