"""A report for people: the verdict, what failed and how to repeat it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_decode_contract.outcome import Outcome
from mla_decode_contract.verdict import EXIT_INCOMPLETE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MOST_NAMED = 12
_FAILED = Outcome.FAILED.value


def first_line(report: Mapping[str, Any]) -> str:
    """Who was tested on what, with the evidence word."""
    adapter, device, shard = report["adapter"], report["device"], report["shard"]
    name = f"{adapter['backend']} {adapter['version'] or ''}".rstrip()
    where = f"{device['arch']}{' (assumed)' if device['assumed'] else ''}"
    mutant = f" with the mutant {report['mutant']}" if report["mutant"] else ""
    part = f", shard {shard['index']}/{shard['count']}" if shard else ""
    merged = report["merged_from"]
    return (
        f"{report['evidence'] or 'nothing ran'}: {name}{mutant} on {where}, contract "
        f"{report['contract']['core']}, kit {report['kit']['version']}, "
        f"profile {report['profile']}, seed {report['seed']}{part}"
        f"{f', merged from {merged} shards' if merged else ''}"
    )


def plain_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The summary: a line a case, then what needs a reader's eye, then the verdict.

    Args:
        report: Of the schema's newest version.
    """
    yield first_line(report)
    for case in report["cases"]:
        if case["outcome"] != Outcome.NOT_RUN.value:
            word = case["outcome"].replace("_", " ")
            new = "  provisional" if case["provisional"] else ""
            yield (
                f"{word:15}{case['id']:42}{units_text(case):>22}"
                f"{case['duration_s']:8.2f} s{new}"
            )
    for case in report["cases"]:
        yield from _failure_lines(case)
    for override in report["tolerances"]:
        yield (
            f"tolerance of {override['case']}: {override['units']:g} units "
            f"({override['reason']})"
        )
    yield _counted(report["counts"])
    if any(report["provisional"].values()):
        yield f"provisional, not counted: {_counted(report['provisional'])}"
    if report["exit_code"] == EXIT_INCOMPLETE and report["not_run"]:
        named = ", ".join(report["not_run"][:_MOST_NAMED])
        more = len(report["not_run"]) - _MOST_NAMED
        yield f"not run: {named}{f' and {more} more' if more > 0 else ''}"
    if report["shard"] and report["shard"]["count"] > 1:
        yield "a shard proves no conformance: merge the reports of all of them"
    yield f"verdict: {report['verdict']}"


def units_text(case: Mapping[str, Any]) -> str:
    """The worst measurement: ``1.02 of 4 units``."""
    if not case["measurements"]:
        return ""
    worst = max(case["measurements"], key=lambda m: m["units"] / m["budget"])
    return f"{worst['units']:.3g} of {worst['budget']:g} units"


def _failure_lines(case: Mapping[str, Any]) -> Iterator[str]:
    heads = {_FAILED: "FAILED", Outcome.KNOWN_FAILURE.value: "known failure"}
    head = heads.get(case["outcome"])
    if head is None:
        return
    if case["provisional"] and case["outcome"] == _FAILED:
        head = "provisional, failed:"
    failure = case["failure"]
    if failure is not None:
        said = f"[{failure['kind']}] {failure['message']}"
        yield f"{head} {case['clause']} {case['id']}: {said}"
    if case["outcome"] == _FAILED:
        yield f"  repeat: {case['repeat']}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count} {word.replace('_', ' ')}" for word, count in counts.items() if count
    )
