"""`mla-decode doctor`: what is installed, what is wrong with it, and the fix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from mla_decode.cli.console import console
from mla_decode.diagnosis.children import PATIENCE_S
from mla_decode.diagnosis.doctor import diagnose
from mla_decode.errors import ContractError

if TYPE_CHECKING:
    from mla_decode.diagnosis.doctor import Diagnosis
    from mla_decode.diagnosis.finding import Finding

_STYLES = {"ok": "green", "warn": "yellow", "error": "bold red"}


def doctor(
    *,
    arch: Annotated[
        str | None,
        typer.Option(help="Judge as if the machine had it: gfx942, gfx950, sm_90..."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one import may take.")
    ] = PATIENCE_S,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for machines.")
    ] = False,
) -> None:
    """Say what is installed here, what is wrong with it, and how to repair it.

    Libraries are tried in child processes. Exit codes: 0 healthy, 1 something is
    wrong, 4 usage.
    """
    try:
        found = diagnose(arch, timeout)
    except ContractError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(4) from error
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _print_table(found)
    if not found.healthy:
        raise typer.Exit(1)


def _print_table(found: Diagnosis) -> None:
    out = console()
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column("about", style="bold", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for section in found.sections:
        about = section.about
        for finding in section.findings:
            level = Text(finding.level.value, style=_STYLES[finding.level.value])
            table.add_row(about, level, _text(finding))
            about = ""
    out.print(table)
    verdict = "healthy" if found.healthy else "something is wrong: see error above"
    out.print(Text(verdict, style=_STYLES["ok" if found.healthy else "error"]))


def _text(finding: Finding) -> Text:
    text = Text(finding.what)
    if finding.got:
        text.append(f"\ngot: {finding.got}", style="dim")
    if finding.fix:
        text.append(f"\nfix: {finding.fix}", style="cyan")
    return text
