"""Where the command line begins: the doctor also works where torch does not."""

from __future__ import annotations

import sys

import typer

from mla_decode.cli.doctor import doctor

EXIT_USAGE = 4
_CLICK_USAGE = 2


def main() -> None:
    """Run the command line; usage errors exit with 4, since 2 is taken elsewhere.

    Every other command needs torch, and discovering backends imports it.
    """
    if sys.argv[1:2] == ["doctor"]:
        alone = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        alone.callback()(_commands)
        alone.command("doctor")(doctor)
        run(alone)
    from mla_decode.cli.app import main as run_app  # noqa: PLC0415 - imports torch

    run_app()


def run(app: typer.Typer) -> None:
    """Run an application; it ends the process."""
    try:
        app()
    except SystemExit as stop:
        sys.exit(EXIT_USAGE if stop.code == _CLICK_USAGE else stop.code)


def _commands() -> None:
    """Keep the command a command, where it is the only one."""
