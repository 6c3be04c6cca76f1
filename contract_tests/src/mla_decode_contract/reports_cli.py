"""The commands that read reports of runs: `merge` and `diff`."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer

from mla_decode_contract.verdict import EXIT_CONFORMANT, EXIT_FAILED, EXIT_USAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode_contract.diffing import CaseChange, Difference
    from mla_decode_contract.target import UsageProblem

_HELP = "A report.json, or its directory."


def merge(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help=_HELP)],
    report: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="Directory for the whole's reports.", file_okay=False),
    ] = None,
) -> None:
    """Merge the reports of `run --shard I/N` into one verdict.

    Exit status: 0 conformant, 1 failed, 3 incomplete, 4 no shards of one run.
    """
    from mla_decode_contract import merging  # noqa: PLC0415 - needs core
    from mla_decode_contract.reading import read_report  # noqa: PLC0415 - needs core
    from mla_decode_contract.report import (  # noqa: PLC0415 - as above
        make_directory,
        write_reports,
    )
    from mla_decode_contract.summary import plain_lines  # noqa: PLC0415 - as above
    from mla_decode_contract.target import UsageProblem  # noqa: PLC0415 - as above

    try:
        whole = merging.merge([read_report(path) for path in reports])
        if report is not None:
            make_directory(report)
    except UsageProblem as problem:
        _leave(problem)
    if report is not None:
        write_reports(whole, report)
    for line in plain_lines(whole):
        sys.stdout.write(f"{line}\n")
    raise typer.Exit(whole["exit_code"])


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help=_HELP)],
    new: Annotated[Path, typer.Argument(metavar="NEW", help=_HELP)],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what changed from an older report to a newer one.

    Exit status: 0 nothing is worse, 1 something is, 4 not comparable.
    """
    from mla_decode_contract.diffing import compare  # noqa: PLC0415 - needs core
    from mla_decode_contract.reading import read_report  # noqa: PLC0415 - as above
    from mla_decode_contract.target import UsageProblem  # noqa: PLC0415 - as above

    try:
        found = compare(read_report(old), read_report(new))
    except UsageProblem as problem:
        _leave(problem)
    if as_json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=2) + "\n")
    else:
        for line in lines_of(found):
            sys.stdout.write(f"{line}\n")
    raise typer.Exit(EXIT_FAILED if found.is_worse else EXIT_CONFORMANT)


def lines_of(found: Difference) -> Iterator[str]:
    """A difference for people; what is worse comes first."""
    yield f"verdict: {found.verdict_was} -> {found.verdict_now}"
    for title, changes in (
        ("worse", found.worse),
        ("better", found.better),
        ("new", found.new),
        ("gone", found.gone),
    ):
        for change in changes:
            yield from _case_lines(title, change)
    for limit in found.limits:
        word = "narrower" if limit.is_narrower else "wider"
        yield f"{word:10}{limit.what}: {limit.was} -> {limit.now}"
    for drift in found.drift:
        yield f"{'drift':10}{drift.what}: {drift.was or 'none'} -> {drift.now or 'none'}"
    for case in found.slower:
        yield f"{'slower':10}{case.case}: {case.was_s:.2f} s -> {case.now_s:.2f} s"
    yield f"time: {found.duration_was_s:.1f} s -> {found.duration_now_s:.1f} s"
    yield "WORSE" if found.is_worse else "not worse"


def _case_lines(title: str, change: CaseChange) -> Iterator[str]:
    was, now = (str(o or "none").replace("_", " ") for o in (change.was, change.now))
    new = " (provisional)" if change.provisional else ""
    said = f": {change.message}" if change.message else ""
    yield f"{title:10}{change.clause} {change.case}: {was} -> {now}{new}{said}"
    if change.repeat is not None:
        yield f"{'':10}repeat: {change.repeat}"


def _leave(problem: UsageProblem) -> NoReturn:
    sys.stderr.write(f"ERROR: {problem}\n")
    raise typer.Exit(EXIT_USAGE) from problem
