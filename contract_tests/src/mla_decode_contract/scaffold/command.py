"""The command `new`: an adapter distribution to begin with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mla_decode_contract.verdict import EXIT_USAGE

DEFAULT_ARCH = "sm_90"
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Empty, or not there yet.")
]


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The backend's name.")],
    directory: Directory,
    arch: Annotated[
        str, typer.Option(help="The accelerator that the kernels are for.")
    ] = DEFAULT_ARCH,
) -> None:
    """Write a new adapter, which keeps the contract over its simulator as it is.

    Exit status: 0 written; 4 a name, architecture or directory that will not do.
    """
    from mla_decode_contract.scaffold.problem import (  # noqa: PLC0415 - `list` needs no templates
        ScaffoldProblem,
    )
    from mla_decode_contract.scaffold.write import (  # noqa: PLC0415 - as above
        scaffold,
    )

    try:
        written = scaffold(name, directory, arch=arch)
    except ScaffoldProblem as problem:
        sys.stderr.write(f"ERROR: {problem}\n")
        raise typer.Exit(EXIT_USAGE) from problem
    for path in written:
        sys.stdout.write(f"{path}\n")
    sys.stdout.write(
        f"next: pip install -e '{directory}[test]' && "
        f"mla-decode-contract run {name} --assume-arch {arch}\n"
    )
