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
from mla_decode_contract.target import UsageProblem

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
    machine, shard = run.machine, run.settings.shard
    return {
        "schema_version": SCHEMA_VERSION,
        **run.software(),
        "evidence": run.evidence or None,
        "evidence_of_backend": machine.get("evidence_of_backend"),
        "profile": run.target.profile,
        "quick": run.settings.is_quick,
        "shard": None if shard is None else asdict(shard),
        "merged_from": 0,
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
        "provisional": verdict.provisional,
        "not_run": list(verdict.not_run),
        "known_failures": [asdict(k) for k in run.exceptions.known_failures],
        "tolerances": [asdict(t) for t in run.exceptions.tolerances],
        "cases": [
            {
                **case_entry(result, run.contract),
                "repeat": _repeat(run, result),
            }
            for result in results.values()
        ],
    }


def case_entry(result: CaseResult, contract: str) -> dict[str, Any]:
    """A case with its result as the report lists it, without a command to repeat it."""
    case = BY_ID[result.case]
    return {
        **case.as_dict(),
        **result.as_dict(),
        "provisional": case.is_provisional(contract),
        "repeat": None,
    }


def make_directory(directory: Path) -> None:
    """Make the directory of the reports, before there is anything to lose.

    Raises:
        UsageProblem: It cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageProblem(
            f"{directory} cannot be made (got: {error.strerror}; allowed: a directory "
            "that can be written to). Choose another --report."
        ) from error


def write_reports(document: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Write report.json and junit.xml.

    Args:
        document: Of a finished run, or of merged shards.
        directory: Made where it is absent.

    Returns:
        The report as it reads back; it keeps the schema.
    """
    report = json.loads(json.dumps(document))
    validate(report)
    make_directory(directory)
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
