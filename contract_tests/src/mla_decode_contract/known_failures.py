"""The known-failures file: each entry with its reason, each held to its word."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode_contract.catalogue import BY_ID
from mla_decode_contract.target import UsageProblem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """A case that is expected to fail; if it passes, the run fails."""

    case: str
    reason: str
    issue: str
    """Where it is being worked on: an address or a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToleranceOverride:
    """Another error budget for one case."""

    case: str
    units: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceptions:
    """What a run lets pass, and why: all of it stands in the report."""

    known_failures: tuple[KnownFailure, ...] = ()
    tolerances: tuple[ToleranceOverride, ...] = ()

    def known(self, case_id: str) -> KnownFailure | None:
        """The entry of a case, if there is one."""
        return next((k for k in self.known_failures if k.case == case_id), None)

    def names(self, case_id: str) -> bool:
        """Whether the file says anything of a case."""
        return self.known(case_id) is not None or case_id in self.budgets

    @property
    def budgets(self) -> dict[str, float]:
        """Units by case id."""
        return {override.case: override.units for override in self.tolerances}


def read_exceptions(path: Path) -> Exceptions:
    """Read a TOML file of ``[[known_failure]]`` and ``[[tolerance]]`` tables.

    Raises:
        UsageProblem: The file cannot be read, has another form, names a case that
            does not exist or one twice.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageProblem(f"cannot read {path}: {error}") from error
    unknown = sorted(set(data) - {"known_failure", "tolerance"})
    if unknown:
        raise UsageProblem(f"{path}: unknown tables {', '.join(unknown)}")
    known = [
        KnownFailure(
            **_texts(path, "known_failure", entry, ("case", "reason", "issue"))
        )
        for entry in _entries(path, data, "known_failure")
    ]
    tolerances = [
        ToleranceOverride(
            units=_units(path, entry),
            **_texts(
                path,
                "tolerance",
                {key: value for key, value in entry.items() if key != "units"},
                ("case", "reason"),
            ),
        )
        for entry in _entries(path, data, "tolerance")
    ]
    for kind in (known, tolerances):
        _require_cases(path, [entry.case for entry in kind])
    return Exceptions(known_failures=tuple(known), tolerances=tuple(tolerances))


def _entries(path: Path, data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    entries = data.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise UsageProblem(f"{path}: {name} is written as [[{name}]] tables")
    return entries


def _texts(
    path: Path, table: str, entry: dict[str, Any], keys: tuple[str, ...]
) -> dict[str, str]:
    if set(entry) != set(keys):
        raise UsageProblem(
            f"{path}: a [[{table}]] has the keys {', '.join(sorted(entry)) or 'none'}; "
            f"it needs exactly {', '.join(keys)}"
        )
    for key, value in entry.items():
        if not isinstance(value, str) or not value.strip():
            raise UsageProblem(f"{path}: {key} of a [[{table}]] is not a text")
    return {key: entry[key] for key in keys}


def _units(path: Path, entry: dict[str, Any]) -> float:
    units = entry.get("units")
    if (
        isinstance(units, bool)
        or not isinstance(units, (int, float))
        or not 0 < units <= sys.float_info.max
    ):
        raise UsageProblem(f"{path}: units of a [[tolerance]] is a number above 0")
    return float(units)


def _require_cases(path: Path, case_ids: list[str]) -> None:
    for case_id in case_ids:
        if case_id not in BY_ID:
            raise UsageProblem(f"{path}: no case is named {case_id!r}")
    twice = sorted(case_id for case_id, times in Counter(case_ids).items() if times > 1)
    if twice:
        raise UsageProblem(f"{path}: {', '.join(twice)} stands there twice")
