"""Options that adapters add to commands, through their backend objects."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_decode.discovery import discover

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from mla_decode.backend import CliOption
    from mla_decode.device import DeviceInfo


class AssumedLibraries:
    """Values of the adapters' options, and who has use for them."""

    def __init__(self, owners: Mapping[CliOption, str]) -> None:
        self._owners = owners
        self._given: dict[CliOption, str] = {}

    def give(self, option: CliOption, value: str | None) -> None:
        """Keep what the command line says; None where it says nothing."""
        if value is not None:
            self._given[option] = value

    def __call__(self, device: DeviceInfo) -> DeviceInfo:
        """Apply every value, or else default, to an assumed device."""
        for option in self._owners:
            value = self._given.get(option, option.default)
            if value is not None:
                device = option.apply(device, value)
        return device

    def warn_unasked(self, asked: Collection[str]) -> None:
        """Say on stderr which values changed nothing, since nobody asked their backend."""
        for option, value in self._given.items():
            owner = self._owners[option]
            if owner not in asked:
                typer.echo(
                    f"warning: {option.name} {value} changes nothing: {owner} was not "
                    "asked. Fix: ask it by name.",
                    err=True,
                )


def with_adapter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one more option for each that an installed backend declares.

    The command takes a keyword ``describe``: an `AssumedLibraries` with the options'
    values.
    """
    owners = {
        option: candidate.name
        for candidate in discover().values()
        if candidate.backend is not None
        for option in candidate.backend.cli_options
    }
    names = {_parameter_name(option): option for option in owners}
    signature = inspect.signature(command, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.name != "describe"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    option.name,
                    help=option.help,
                    show_default=option.default is not None and option.default,
                ),
            ],
        )
        for name, option in names.items()
    ]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        describe = AssumedLibraries(owners)
        for name, option in names.items():
            describe.give(option, values.pop(name))
        command(describe=describe, **values)

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*kept, *added)
    ]
    wrapped.__signature__ = signature.replace(  # type: ignore[attr-defined]  # typer reads it
        parameters=parameters, return_annotation=None
    )
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _parameter_name(option: CliOption) -> str:
    return option.name.lstrip("-").replace("-", "_")
