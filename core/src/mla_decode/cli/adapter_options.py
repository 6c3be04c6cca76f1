"""Options that adapters add to commands, through their backend objects."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_decode.discovery import discover

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_decode.backend import CliOption
    from mla_decode.device import DeviceInfo


def with_adapter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one more option for each that an installed backend declares.

    The command takes a keyword ``describe``: a function that applies the options'
    values to an assumed device.
    """
    options = [
        option
        for candidate in discover().values()
        if candidate.backend is not None
        for option in candidate.backend.cli_options
    ]
    names = {_parameter_name(option): option for option in options}
    signature = inspect.signature(command, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.name != "describe"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=Annotated[
                str | None, typer.Option(option.name, help=option.help)
            ],
        )
        for name, option in names.items()
    ]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        chosen = {option: values.pop(name) for name, option in names.items()}

        def describe(device: DeviceInfo) -> DeviceInfo:
            for option, value in chosen.items():
                if value is not None:
                    device = option.apply(device, value)
            return device

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
