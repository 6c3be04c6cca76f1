"""`mla-decode probe`: let a backend try its library's calls where a death is harmless."""

from __future__ import annotations

from typing import Annotated, Protocol, runtime_checkable

import typer

from mla_decode.cli.adapter_options import (
    AssumedLibraries,  # noqa: TC001 - typer reads the annotations
)
from mla_decode.device import DeviceInfo, detect_device
from mla_decode.discovery import discover
from mla_decode.errors import ArgumentError, ContractError


@runtime_checkable
class Probes(Protocol):
    """A backend that can try its library's calls in child processes."""

    def probe(self, *, as_json: bool, device: DeviceInfo) -> int:
        """Try, record, report drift; returns the exit code: 0, or 1 for a defect."""


def probe(
    *,
    describe: AssumedLibraries,
    backend: Annotated[str, typer.Argument(help="The backend, such as rocm_aiter.")],
    arch: Annotated[
        str | None, typer.Option(help="Simulate this one. Default: this machine's.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for machines.")
    ] = False,
) -> None:
    """Try a library's calls in child processes; record what works, report drift.

    Exit codes: 0 no defect, 1 an accepted call dies or is wrong, 4 usage.
    """
    try:
        device = describe(detect_device() if arch is None else DeviceInfo.assume(arch))
        probing = _probing(backend)
    except ContractError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(4) from error
    describe.warn_unasked({backend})
    raise typer.Exit(probing.probe(as_json=as_json, device=device))


def _probing(name: str) -> Probes:
    known: dict[str, Probes] = {}
    for candidate in discover().values():
        backend: object = candidate.backend
        if isinstance(backend, Probes):
            known[candidate.name] = backend
    found = known.get(name)
    if found is None:
        raise ArgumentError(
            "No installed backend of this name can be probed.",
            got=repr(name),
            allowed=", ".join(sorted(known)) or "none is installed",
            fix="install the adapter, or correct the name",
        )
    return found
