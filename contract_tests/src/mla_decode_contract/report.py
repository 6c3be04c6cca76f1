"""report.json and junit.xml: a run as a document, checked against its schema."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped] # it ships no types

from mla_decode_contract.catalogue import BY_ID
from mla_decode_contract.junit import junit_xml
from mla_decode_contract.outcome import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from mla_decode_contract.outcome import CaseResult
    from mla_decode_contract.session import Run

SCHEMA_VERSION = "1.1"


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a report, as the wheel carries it."""
    text = (
        files("mla_decode_contract")
        .joinpath("schema/report.schema.json")
        .read_text(encoding="utf-8")
    )
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def validate(report: dict[str, Any]) -> None:
    """Hold a report to the schema.

    Raises:
        jsonschema.ValidationError: It is of another form.
    """
    jsonschema.Draft202012Validator(schema()).validate(report)


def as_report(run: Run) -> dict[str, Any]:
    """A finished run as plain data of the schema."""
    verdict = run.verdict()
    finished = run.finished_at or run.started_at
    results = run.all_results()
    machine = run.machine
    return {
        "schema_version": SCHEMA_VERSION,
        **run.software(),
        "evidence": run.evidence or None,
        "evidence_of_backend": machine.get("evidence_of_backend"),
        "profile": run.target.profile,
        "quick": run.settings.is_quick,
        "seed": run.target.seed,
        "mutant": run.target.mutant,
        "device": run.target.device.as_dict(),
        "device_name": machine.get("device_name"),
        "driver": machine.get("driver"),
        "runtime": machine.get("runtime"),
        "torch": machine.get("torch"),
        "libraries": machine.get("libraries", {}),
        "declared": machine.get("declared"),
        "kernels": sorted({k for r in results.values() for k in r.kernels}),
        "started_at": _time(run.started_at),
        "finished_at": _time(finished),
        "duration_s": round(finished - run.started_at, 3),
        "verdict": verdict.word,
        "exit_code": verdict.exit_code,
        "counts": verdict.counts,
        "not_run": list(verdict.not_run),
        "known_failures": [asdict(k) for k in run.exceptions.known_failures],
        "tolerances": [asdict(t) for t in run.exceptions.tolerances],
        "cases": [
            {
                **BY_ID[case_id].as_dict(),
                **result.as_dict(),
                "repeat": _repeat(run, result),
            }
            for case_id, result in results.items()
        ],
    }


def write_reports(run: Run, directory: Path) -> dict[str, Any]:
    """Write report.json and junit.xml of a finished run.

    Returns:
        The report, which keeps the schema.
    """
    report = json.loads(json.dumps(as_report(run)))
    validate(report)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2) + "\n"
    (directory / "report.json").write_text(text, encoding="utf-8")
    (directory / "junit.xml").write_bytes(junit_xml(report))
    return dict(report)


def _repeat(run: Run, result: CaseResult) -> str | None:
    """The command that repeats a failure."""
    failures = {Outcome.FAILED, Outcome.KNOWN_FAILURE}
    return run.command(result.case) if result.outcome in failures else None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(
        timespec="seconds"
    )
