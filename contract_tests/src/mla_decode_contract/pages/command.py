"""The command `report`: a run's page and badge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mla_decode_contract.pages.form import Form
from mla_decode_contract.verdict import EXIT_USAGE

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="What `run BACKEND --report DIR` wrote."),
]


def report(
    directory: Directory,
    form: Annotated[
        Form, typer.Option("--format", help="Markdown, or one HTML file.")
    ] = Form.HTML,
) -> None:
    """Make a page and a badge of a run's report, beside it.

    Writes DIR/report.html or DIR/report.md, and DIR/badge.json for a shields.io
    endpoint badge. A DIR/prove.json, from `prove BACKEND --json`, is shown too.

    Exit status: 0 written, whatever the verdict; 4 no report of the kit.
    """
    from mla_decode_contract.pages.publish import (  # noqa: PLC0415 - `list` needs no templates
        publish,
    )
    from mla_decode_contract.reading import ReportProblem  # noqa: PLC0415 - as above

    try:
        written = publish(directory, form)
    except ReportProblem as problem:
        sys.stderr.write(f"ERROR: {problem}\n")
        raise typer.Exit(EXIT_USAGE) from problem
    for path in written:
        sys.stdout.write(f"{path}\n")
