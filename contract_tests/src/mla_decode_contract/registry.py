"""Binds the catalogue's ids to the functions that implement them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from mla_decode_contract.catalogue import BY_ID

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext

CaseFunction = Callable[["CaseContext"], None]

_MODULES = (
    "addressing",
    "backend",
    "block",
    "builder",
    "dcp",
    "dtype",
    "empty",
    "heads",
    "layers",
    "lengths",
    "lse",
    "mask",
    "out",
    "reads",
    "refuse",
    "repeat",
    "scale",
    "stable",
    "stale",
    "sync",
    "ubatch",
    "validate",
)
_functions: dict[str, CaseFunction] = {}


def implements(*case_ids: str) -> Callable[[CaseFunction], CaseFunction]:
    """Register a function for cases of the catalogue.

    Raises:
        LookupError: The catalogue has no such id, or the id has a function already.
    """

    def register(function: CaseFunction) -> CaseFunction:
        for case_id in case_ids:
            if case_id not in BY_ID or case_id in _functions:
                raise LookupError(f"{case_id!r} is unknown or registered twice")
            _functions[case_id] = function
        return function

    return register


def implementations() -> dict[str, CaseFunction]:
    """Every case's function by id; imports the case modules, and so torch."""
    for module in _MODULES:
        import_module(f"mla_decode_contract.cases.{module}")
    return dict(_functions)
