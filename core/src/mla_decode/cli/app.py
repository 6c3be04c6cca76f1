"""The typer application: commands, and the exit codes that they share."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

from mla_decode.cli.adapter_options import with_adapter_options
from mla_decode.cli.bench import bench
from mla_decode.cli.coverage import coverage
from mla_decode.cli.doctor import doctor
from mla_decode.cli.entry import run
from mla_decode.cli.explain import explain
from mla_decode.cli.probe import probe
from mla_decode.demo.command import demo
from mla_decode.version import CONTRACT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

app: typer.Typer = typer.Typer(
    name="mla-decode",
    help=(
        "Decode multi-head latent attention through one contract. "
        "Exit codes: 0 accepted, 1 refused or failed, 4 usage."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut the names of options in a narrow terminal
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mla-decode {version('mla-decode')} (contract {CONTRACT_VERSION})")
        raise typer.Exit


@app.callback()
def _root(
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of the library and of the contract.",
        ),
    ] = False,
) -> None:
    """Hold the options that stand before every command."""
    del show_version


def main() -> None:
    """Run the command line; usage errors exit with 4, since 2 is taken elsewhere."""
    commands: dict[str, Callable[..., None]] = {
        "explain": with_adapter_options(explain),
        "bench": bench,
        "coverage": with_adapter_options(coverage),
        "demo": demo,
        "doctor": doctor,
        "probe": with_adapter_options(probe),
    }
    for name, command in commands.items():
        summary = str(command.__doc__).partition("\n\n")[0]
        app.command(name, short_help=summary)(command)
    run(app)
