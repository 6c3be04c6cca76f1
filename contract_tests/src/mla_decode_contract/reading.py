"""Reading a report back: foreign and corrupt files are typed errors."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped] # it ships no types

from mla_decode_contract.report import SCHEMA_VERSION, schema, validate
from mla_decode_contract.target import UsageProblem

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "report.json"
_OF_A_REPORT = frozenset({"schema_version", "kit", "verdict", "cases"})
_SINCE_1_1: dict[str, Any] = {
    "declared": None,
    "shard": None,
    "merged_from": 0,
    "provisional": {},
}
"""What a report of schema 1.0 says of the fields that it has not."""


class ReportProblem(UsageProblem):
    """A report cannot be used for what was asked.

    Attributes:
        got: What is there.
        allowed: What can be used.
        fix: What to do.
    """

    def __init__(self, message: str, *, got: str, allowed: str, fix: str) -> None:
        super().__init__(f"{message} (got: {got}; allowed: {allowed}). {fix}")
        self.got, self.allowed, self.fix = got, allowed, fix


class ForeignReport(ReportProblem):
    """It is no report of the kit, or of a schema that this kit does not read."""


class CorruptReport(ReportProblem):
    """It is a report that breaks its own schema or contradicts itself."""


def read_report(path: Path) -> dict[str, Any]:
    """Read a report, checked against the schema.

    Args:
        path: Of a report.json, or of the directory that holds one.

    Returns:
        The report; one of schema 1.0 is filled up to the newest schema's fields.

    Raises:
        ForeignReport: It is another file.
        CorruptReport: It was a report.
    """
    file = path / FILE_NAME if path.is_dir() else path
    report = _as_report(file, _parsed(file))
    _require_consistency(file, report)
    for key, value in _SINCE_1_1.items():
        report.setdefault(key, value)
    for case in report["cases"]:
        case.setdefault("repeat", None)
        case.setdefault("provisional", False)
    return report


def _parsed(file: Path) -> Any:
    try:
        return json.loads(
            file.read_text(encoding="utf-8"),
            parse_float=_finite,
            parse_constant=_finite,
        )
    except OSError as error:
        raise ForeignReport(
            f"{file} cannot be read",
            got=error.strerror or type(error).__name__,
            allowed=f"a {FILE_NAME}, or the directory of one",
            fix="Write one with `run BACKEND --report DIR`.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ForeignReport(
            f"{file} is no JSON",
            got=str(error),
            allowed=f"a {FILE_NAME}",
            fix="Name the JSON that `run BACKEND --report DIR` wrote.",
        ) from error


def _finite(text: str) -> float:
    """A number; Python's reader would also take NaN and what overflows."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _as_report(file: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or _OF_A_REPORT - set(value):
        keys = ", ".join(sorted(value)[:6]) if isinstance(value, dict) else ""
        raise ForeignReport(
            f"{file} is no report of the contract kit",
            got=f"a JSON object of {keys}" if keys else f"a {type(value).__name__}",
            allowed=f"the fields {', '.join(sorted(_OF_A_REPORT))} and more",
            fix=f"Name the {FILE_NAME} that `run BACKEND --report DIR` wrote.",
        )
    known = schema()["properties"]["schema_version"]["enum"]
    if value["schema_version"] not in known:
        raise ForeignReport(
            f"{file} has another schema",
            got=f"schema_version {value['schema_version']!r}",
            allowed=", ".join(known),
            fix=f"Use a kit of its version; this one writes {SCHEMA_VERSION}.",
        )
    try:
        validate(value)
    except jsonschema.ValidationError as error:
        raise CorruptReport(
            f"{file} breaks the schema at {error.json_path}",
            got=error.message[:300],
            allowed=f"schema {value['schema_version']}",
            fix="Take the file as the kit wrote it, or run the kit again.",
        ) from error
    return value


def _require_consistency(file: Path, report: dict[str, Any]) -> None:
    """Hold the counts to the cases: a report edited by hand shows itself."""
    times = Counter(case["id"] for case in report["cases"])
    twice = sorted(case_id for case_id, count in times.items() if count > 1)
    counted: dict[str, int] = dict.fromkeys(report["counts"], 0)
    for case in report["cases"]:
        if not case.get("provisional", False):
            counted[case["outcome"]] += 1
    if twice or counted != report["counts"]:
        raise CorruptReport(
            f"{file} contradicts itself",
            got=f"{', '.join(twice[:4])} twice" if twice else f"{report['counts']}",
            allowed="each case once" if twice else f"counts of its cases: {counted}",
            fix="Take the file as the kit wrote it, or run the kit again.",
        )
