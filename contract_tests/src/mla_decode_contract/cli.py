"""The command line: `run`, `list`, `prove`, and what reads reports."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mla_decode_contract import reports_cli
from mla_decode_contract.catalogue import CASES
from mla_decode_contract.pages.command import report as make_page
from mla_decode_contract.scaffold.command import new
from mla_decode_contract.verdict import (
    EXIT_CONFORMANT,
    EXIT_FAILED,
    EXIT_INCOMPLETE,
    EXIT_USAGE,
)

if TYPE_CHECKING:
    import pytest

    from mla_decode_contract.prove import Proof
    from mla_decode_contract.session import Run

app = typer.Typer(
    name="mla-decode-contract",
    help="Prove an mla-decode adapter on your own hardware, or without it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut the names of options in a narrow terminal
    pretty_exceptions_enable=False,
)
app.command(name="report")(make_page)
app.command()(new)
_CLICK_USAGE = 2


def _print_version(asked: bool) -> None:
    if asked:
        from mla_decode.version import (  # noqa: PLC0415 - slow to import
            CONTRACT_VERSION,
        )

        kit = version("mla-decode-contract")
        typer.echo(f"mla-decode-contract {kit} (contract {CONTRACT_VERSION})")
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
            help="Print the versions of the kit and of the contract.",
        ),
    ] = False,
) -> None:
    """Hold the options that stand before every command."""
    del show_version


class _Catcher:
    """Keeps the run of an inner pytest session."""

    def __init__(self) -> None:
        self.run: Run | None = None

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        from mla_decode_contract.plugin import RUN_KEY  # noqa: PLC0415 - `list` needs no pytest

        self.run = config.stash.get(RUN_KEY, None)


@app.command(name="list")
def list_cases(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List every case: its clause, profile, features and purpose.

    A case that is new in this minor of the contract is provisional: reported, and not
    counted in a verdict.
    """
    from mla_decode.cli.console import console  # noqa: PLC0415 - slow to import
    from mla_decode.version import CONTRACT_VERSION  # noqa: PLC0415 - as above

    if as_json:
        listed = [
            {**case.as_dict(), "provisional": case.is_provisional(CONTRACT_VERSION)}
            for case in CASES
        ]
        sys.stdout.write(json.dumps(listed, indent=2) + "\n")
        return
    out = console()
    out.print(Text(f"{len(CASES)} cases"))
    for case in CASES:
        facts = (
            case.clause.value,
            case.since,
            "provisional" if case.is_provisional(CONTRACT_VERSION) else "",
            case.profile,
            "quick" if case.is_quick else "",
            *(f"needs {feature}" for feature in case.features),
        )
        out.print(Text(f"{case.id}  {', '.join(filter(None, facts))}"))
        out.print(Padding(Text(case.purpose), (0, 0, 0, 4), expand=False))


@app.command()
def run(
    backend: Annotated[
        str,
        typer.Argument(metavar="BACKEND", help="Entry-point name or module:attribute."),
    ],
    pytest_args: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Argument(metavar="[-- PYTEST ARGS]", help="Passed on to pytest."),
    ] = None,
    arch: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="Require this hardware."),
    ] = None,
    assume_arch: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="Simulate or interpret this architecture on the CPU."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The quick cases only.")
    ] = False,
    case: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="One case only, by its id."),
    ] = None,
    shard: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(metavar="I/N", help="One part of the cases; see `merge`."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws other data.", min=0)] = 0,
    report: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="Directory for report.json and junit.xml.", file_okay=False),
    ] = None,
    known_failures: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="TOML of known failures and tolerances.", dir_okay=False),
    ] = None,
    workers: Annotated[
        Optional[int],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="Worker processes; the cores by default.", min=1, max=6),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Longest time of one case, in seconds.", min=0.1)
    ] = 60.0,
    mutant: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="Run a deliberately wrong wrapper of the backend."),
    ] = None,
) -> None:
    """Run the contract's cases against a backend.

    Exit status: 0 conformant, 1 failed, 3 incomplete, 4 usage.
    """
    import pytest  # noqa: PLC0415 - `list` needs no pytest

    options = {
        "--mla-backend": backend,
        "--mla-arch": arch,
        "--mla-assume-arch": assume_arch,
        "--mla-case": case,
        "--mla-shard": shard,
        "--mla-seed": seed,
        "--mla-report": report and report.absolute(),
        "--mla-known-failures": known_failures and known_failures.absolute(),
        "--mla-workers": workers,
        "--mla-timeout-s": timeout_s,
        "--mla-mutant": mutant,
    }
    arguments = [
        f"{name}={value}" for name, value in options.items() if value is not None
    ]
    if quick:
        arguments.append("--mla-quick")
    package = Path(str(files("mla_decode_contract")))
    catcher = _Catcher()
    code = pytest.main(
        [
            "-c",
            str(package / "kit.ini"),
            f"--rootdir={package}",
            "--noconftest",
            "-p",
            "mla_decode_contract",
            "-p",
            "no:cacheprovider",
            "-q",
            "--no-header",
            "--tb=short",
            "--pyargs",
            "mla_decode_contract.suite",
            *arguments,
            *(pytest_args or []),
        ],
        plugins=[catcher],
    )
    raise typer.Exit(_exit_code(int(code), catcher.run))


@app.command()
def prove(
    backend: Annotated[
        str,
        typer.Argument(metavar="BACKEND", help="Entry-point name or module:attribute."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    arch: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="Require this hardware."),
    ] = None,
    assume_arch: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="Simulate or interpret this architecture on the CPU."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Redraws of small cases, for false alarms.", min=0)
    ] = 200,
    workers: Annotated[
        Optional[int],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Option(help="Worker processes; the cores by default.", min=1, max=6),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Longest time of one case, in seconds.", min=0.1)
    ] = 60.0,
) -> None:
    """Run the kit against deliberately wrong wrappers of the backend.

    Exit status: 0 all are caught and nothing right is, 1 otherwise, 4 usage.
    """
    from mla_decode_contract.prove import Proof  # noqa: PLC0415 - needs core
    from mla_decode_contract.target import (  # noqa: PLC0415 - needs core
        Target,
        UsageProblem,
        load_backend,
        resolve_device,
    )

    try:
        loaded = load_backend(backend)
        device = resolve_device(loaded, arch=arch, assume_arch=assume_arch)
    except UsageProblem as problem:
        sys.stderr.write(f"ERROR: {problem}\n")
        raise typer.Exit(EXIT_USAGE) from problem
    proof = Proof(
        target=Target(backend=backend, device=device),
        backend=loaded.name,
        workers=workers or 0,
        timeout_s=timeout_s,
        seeds=seeds,
    )
    proof.run()
    if as_json:
        sys.stdout.write(json.dumps(proof.as_dict(), indent=2) + "\n")
        for alarm in proof.alarms:
            sys.stderr.write(f"false alarm: {alarm}\n")
        if proof.problem is not None:
            sys.stderr.write(f"{proof.problem}\n")
    else:
        _print_proof(proof)
    raise typer.Exit(EXIT_CONFORMANT if proof.is_proven else EXIT_FAILED)


app.command()(reports_cli.merge)
app.command()(reports_cli.diff)


def _print_proof(proof: Proof) -> None:
    from mla_decode.cli.console import console  # noqa: PLC0415 - slow to import

    where = proof.target.device.arch
    table = Table(
        title=f"{proof.evidence or 'nothing ran'}: mutants of "
        f"{proof.target.backend} on {where}",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("mutant", "outcome"):
        table.add_column(column, no_wrap=True)
    table.add_column("by", overflow="fold")
    for result in proof.results.values():
        word = "caught" if result.caught else "NOT CAUGHT"
        table.add_row(
            result.name,
            word if result.not_applicable is None else "not applicable",
            result.not_applicable or ", ".join(result.by),
        )
    out = console()
    out.print(table)
    for alarm in proof.alarms:
        out.print(f"false alarm: {alarm}", markup=False)
    if proof.problem is not None:
        out.print(proof.problem, markup=False)
    out.print("proven" if proof.is_proven else "NOT PROVEN")


def _exit_code(pytest_code: int, finished: Run | None) -> int:
    """The kit's exit status; nothing but a judged run can be 0."""
    import pytest  # noqa: PLC0415 - `list` needs no pytest

    if pytest_code == int(pytest.ExitCode.USAGE_ERROR):
        return EXIT_USAGE
    if finished is None or finished.finished_at is None:
        return EXIT_INCOMPLETE
    verdict = finished.verdict()
    is_judged = pytest_code in {0, 1, EXIT_INCOMPLETE}
    if is_judged or verdict.exit_code:
        return verdict.exit_code
    return EXIT_INCOMPLETE


# A listing cuts summaries of its own making; these it wraps.
for _command in app.registered_commands:
    _command.short_help = str(_command.callback.__doc__).partition("\n\n")[0]


def main() -> None:
    """Run the command line; click's own usage errors exit with 4 as ours do."""
    try:
        app(prog_name="mla-decode-contract")
    except SystemExit as left:
        if left.code == _CLICK_USAGE:
            raise SystemExit(EXIT_USAGE) from left
        raise


if __name__ == "__main__":
    main()
