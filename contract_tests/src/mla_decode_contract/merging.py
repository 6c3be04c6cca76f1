"""Merging the reports of a fleet's shards into the report of one run."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mla_decode_contract.identity import kit_version
from mla_decode_contract.outcome import CaseResult, Outcome
from mla_decode_contract.reading import ReportProblem
from mla_decode_contract.report import SCHEMA_VERSION, case_entry
from mla_decode_contract.session import due_cases, provisional_ids
from mla_decode_contract.shard import Shard
from mla_decode_contract.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Report = Mapping[str, Any]

ONE_RUN = (
    "schema_version",
    "contract",
    "kit",
    "core",
    "adapter",
    "python",
    "profile",
    "quick",
    "seed",
    "mutant",
    "known_failures",
    "tolerances",
)
"""What shards of one run have in common, and their device's arch."""
ONE_MACHINE = (
    "evidence",
    "evidence_of_backend",
    "device_name",
    "driver",
    "runtime",
    "torch",
    "libraries",
    "declared",
)
"""The same, known only where the shard prepared a worker."""


class NotOneRun(ReportProblem):
    """Reports are not the shards of one run."""


def merge(reports: Sequence[Report]) -> dict[str, Any]:
    """Merge reports of shards, in any order, and judge the whole.

    A shard that is absent leaves its cases NOT_RUN, and the whole INCOMPLETE.

    Args:
        reports: As `read_report` gives them.

    Raises:
        NotOneRun: One is no shard, two are the same shard, they come of different
            runs, or from another version of the kit.
    """
    shards = _shards(reports)
    for first, other in pairwise(reports):
        _require_same(first, other, ONE_RUN)
        _require_same(first, other, ("vendor", "arch", "assumed"), "device")
    prepared = [r for r in reports if r["evidence"] is not None]
    for first, other in pairwise(prepared):
        _require_same(first, other, ONE_MACHINE)
    first = (prepared or reports)[0]
    results = _results(reports, shards, is_quick=first["quick"])
    verdict = judge(
        results,
        evidence=first["evidence"] or "",
        profile=first["profile"],
        is_quick=first["quick"],
        provisional=provisional_ids(first["contract"]["core"]),
    )
    entries = {case["id"]: case for report in reports for case in report["cases"]}
    return {
        **first,
        "schema_version": SCHEMA_VERSION,
        "shard": None,
        "merged_from": len(reports),
        "platform": _all_of(reports, "platform"),
        "kernels": sorted({k for report in reports for k in report["kernels"]}),
        "started_at": min(report["started_at"] for report in reports),
        "finished_at": max(report["finished_at"] for report in reports),
        "duration_s": round(sum(report["duration_s"] for report in reports), 3),
        "verdict": verdict.word,
        "exit_code": verdict.exit_code,
        "counts": verdict.counts,
        "provisional": verdict.provisional,
        "not_run": list(verdict.not_run),
        "cases": [
            entries.get(case_id) or case_entry(result, first["contract"]["core"])
            for case_id, result in results.items()
        ],
    }


def _shards(reports: Sequence[Report]) -> list[Shard]:
    shards = [Shard(**r["shard"]) if r["shard"] else None for r in reports]
    found = [shard for shard in shards if shard is not None]
    if len(found) < len(shards) or not found:
        whole = [r["adapter"]["backend"] for r in reports if not r["shard"]]
        raise NotOneRun(
            "merge takes reports of shards",
            got=f"a whole run of {', '.join(whole)}" if whole else "no report",
            allowed="reports of `run --shard I/N`",
            fix="A whole run has its verdict already; `diff` compares two.",
        )
    words = [str(shard) for shard in found]
    twice = sorted({word for word in words if words.count(word) > 1})
    if twice or len({shard.count for shard in found}) > 1:
        raise NotOneRun(
            "The shards are not parts of one whole",
            got=", ".join(sorted(words)),
            allowed="each shard of one count, once",
            fix="Leave out what belongs to another run.",
        )
    ours = kit_version()
    theirs = {r["kit"]["version"] for r in reports}
    if theirs != {ours}:
        raise NotOneRun(
            "Another version of the kit dealt these shards",
            got=", ".join(sorted(theirs)),
            allowed=ours,
            fix="Merge with the kit that ran them.",
        )
    return found


def _require_same(
    first: Report, other: Report, keys: Sequence[str], inside: str | None = None
) -> None:
    for key in keys:
        left, right = ((r[inside] if inside else r).get(key) for r in (first, other))
        if left != right:
            where = f"{inside}.{key}" if inside else key
            raise NotOneRun(
                f"The shards come of different runs: they differ in {where}",
                got=f"{_short(left)} and {_short(right)}",
                allowed="one value",
                fix="Run all shards with the same versions, options and devices.",
            )


def _results(
    reports: Sequence[Report], shards: Sequence[Shard], *, is_quick: bool
) -> dict[str, CaseResult]:
    """One result for each case of the whole, in the catalogue's order."""
    found: dict[str, CaseResult] = {}
    for report, shard in zip(reports, shards, strict=True):
        due = {case.id for case in due_cases(is_quick=is_quick, shard=shard)}
        given = {case["id"] for case in report["cases"]}
        if due != given:
            odd = ", ".join(sorted(due ^ given)[:4])
            raise NotOneRun(
                f"Shard {shard} does not hold its own cases",
                got=f"a difference in {odd}",
                allowed=f"the {len(due)} cases that the kit deals to it",
                fix="Take its report as the kit wrote it, or run it again.",
            )
        found.update((result.case, result) for result in _read(report))
    return {
        case.id: found.get(case.id) or CaseResult(case=case.id, outcome=Outcome.NOT_RUN)
        for case in due_cases(is_quick=is_quick)
    }


def _read(report: Report) -> Iterator[CaseResult]:
    return map(CaseResult.from_dict, report["cases"])


def _all_of(reports: Sequence[Report], key: str) -> str:
    return ", ".join(dict.fromkeys(str(report[key]) for report in reports))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
