"""What a page is made of: a run's report, and the proof that may lie beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped] # it ships no types

from mla_decode_contract.reading import (
    CorruptReport,
    ForeignReport,
    ReportProblem,
    read_report,
)

if TYPE_CHECKING:
    from pathlib import Path

PROOF = "prove.json"
_FIX = "Write it with `prove BACKEND --json`, or take it away."
_LONGEST_GOT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A run, and what was proven of it."""

    report: dict[str, Any]
    """Keeps the newest schema."""
    proof: dict[str, Any] | None
    """What ``prove --json`` printed, where it lies beside the report."""


def read_source(directory: Path) -> Source:
    """Read ``report.json``, and ``prove.json`` where there is one.

    Raises:
        ReportProblem: One of them is absent, corrupt, or another program's.
    """
    if not directory.is_dir():
        raise ForeignReport(
            f"{directory} is no directory",
            got="a file" if directory.exists() else "nothing",
            allowed="a directory that `run BACKEND --report DIR` wrote",
            fix="Run the kit with --report first.",
        )
    report = read_report(directory)
    file = directory / PROOF
    return Source(
        report=report, proof=_read_proof(file, report) if file.exists() else None
    )


def _read_proof(file: Path, report: dict[str, Any]) -> dict[str, Any]:
    allowed = "what `prove BACKEND --json` prints"
    try:
        proof = json.loads(file.read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator(_proof_schema()).validate(proof)
    except OSError as error:
        raise ForeignReport(
            f"{file} cannot be read", got=str(error.strerror), allowed=allowed, fix=_FIX
        ) from error
    except (ValueError, RecursionError) as error:
        raise ForeignReport(
            f"{file} is no JSON", got=str(error), allowed=allowed, fix=_FIX
        ) from error
    except jsonschema.ValidationError as error:
        raise CorruptReport(
            f"{file} is no proof: at {error.json_path}",
            got=error.message[:_LONGEST_GOT],
            allowed=allowed,
            fix=_FIX,
        ) from error
    for key, what, tested in (
        ("backend", "another backend", report["adapter"]["backend"]),
        ("arch", "another architecture", report["device"]["arch"]),
        ("evidence", "by other evidence", report["evidence"]),
    ):
        if proof.get(key, tested) != tested:
            raise ReportProblem(
                f"{file} proves {what} than the report beside it tested",
                got=str(proof[key]),
                allowed=str(tested),
                fix="Keep a directory for each backend and machine.",
            )
    return dict(proof)


@cache
def _proof_schema() -> dict[str, Any]:
    text = (
        files("mla_decode_contract")
        .joinpath("schema/proof.schema.json")
        .read_text(encoding="utf-8")
    )
    loaded: dict[str, Any] = json.loads(text)
    return loaded
