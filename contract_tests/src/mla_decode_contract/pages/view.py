"""What a page shows, computed once for both forms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode_contract.pages.heat import HeatMap, heat_maps
from mla_decode_contract.pages.limits import limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode_contract.pages.reading import Source

MEANINGS = {
    "reference": "the torch reference of core ran, on a CPU",
    "simulated": (
        "the adapter ran over its own simulator of the vendor's library, on a CPU; this "
        "says nothing of silicon"
    ),
    "interpreted": (
        "the adapter's kernels ran under an interpreter, on a CPU; this says nothing of "
        "silicon"
    ),
    "hardware": "the adapter's kernels ran on the device itself",
}
"""What each evidence word says, in a sentence."""
OUTCOMES = (
    "passed",
    "refused",
    "failed",
    "known_failure",
    "needs_hardware",
    "not_run",
)
BAD = frozenset({"failed", "known_failure"})
MOST_SLOW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClauseLine:
    """A clause: how its cases ended, and how long they took together."""

    clause: str
    counts: dict[str, int]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One page."""

    title: str
    evidence: str
    meaning: str
    date: str
    """The day on which the run ended, in UTC."""
    report: dict[str, Any]
    proof: dict[str, Any] | None
    facts: tuple[tuple[str, str], ...]
    outcomes: tuple[str, ...]
    """Those that occurred, in order."""
    clauses: tuple[ClauseLine, ...]
    heat: tuple[HeatMap, ...]
    limits: tuple[tuple[str, str], ...]
    slowest: tuple[dict[str, Any], ...]
    failures: tuple[dict[str, Any], ...]
    provisional: tuple[dict[str, Any], ...]
    """Cases that are new in this contract minor: reported, not counted."""


def view(source: Source) -> View:
    """Compute a page from what was read."""
    report = source.report
    cases = report["cases"]
    found = {case["outcome"] for case in cases}
    adapter, device = report["adapter"], report["device"]
    evidence = report["evidence"] or "nothing ran"
    mutant = f" with the mutant {report['mutant']}" if report["mutant"] else ""
    return View(
        title=f"{adapter['backend']}{mutant} on {device['arch']} ({evidence})",
        evidence=evidence,
        meaning=MEANINGS.get(report["evidence"], "no case reached the backend"),
        date=report["finished_at"][:10],
        report=report,
        proof=source.proof,
        facts=tuple(_facts(report)),
        outcomes=tuple(word for word in OUTCOMES if word in found),
        clauses=tuple(_clauses(cases)),
        heat=heat_maps(report),
        limits=limits(report),
        slowest=tuple(sorted(cases, key=lambda c: -c["duration_s"])[:MOST_SLOW]),
        failures=tuple(case for case in cases if case["outcome"] in BAD),
        provisional=tuple(case for case in cases if case["provisional"]),
    )


def worst_units(case: dict[str, Any]) -> str:
    """The measurement that used most of its budget: ``1.02 of 4``; empty without one."""
    if not case["measurements"]:
        return ""
    worst = max(case["measurements"], key=lambda m: m["units"] / m["budget"])
    return f"{worst['units']:.3g} of {worst['budget']:g}"


def _clauses(cases: list[dict[str, Any]]) -> Iterator[ClauseLine]:
    for clause in dict.fromkeys(case["clause"] for case in cases):
        own = [case for case in cases if case["clause"] == clause]
        yield ClauseLine(
            clause=clause,
            counts=Counter(case["outcome"] for case in own),
            duration_s=sum(case["duration_s"] for case in own),
        )


def _facts(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Who was tested on what, with what."""
    adapter, device = report["adapter"], report["device"]
    assumed = " (assumed: tensors lived on the CPU)" if device["assumed"] else ""
    yield "device", f"{device['arch']}{assumed}"
    yield "machine", report["device_name"] or "unknown"
    for name in ("driver", "runtime"):
        if report[name]:
            yield name, report[name]
    distribution = f"{adapter['distribution'] or ''} {adapter['version'] or ''}".strip()
    yield "adapter", distribution or "not from a distribution"
    if adapter["commit"]:
        yield "commit", adapter["commit"]
    libraries = {**device["libraries"], **report["libraries"]}
    for name, version in sorted(libraries.items()):
        yield name, version
    if report["kernels"]:
        yield "kernels", ", ".join(report["kernels"])
    contract = report["contract"]
    yield (
        "contract",
        f"{contract['core']} (the adapter was written to {contract['adapter']})",
    )
    for name in ("kit", "core"):
        yield name, f"{report[name]['name']} {report[name]['version']}"
    yield "torch", report["torch"] or "unknown"
    yield "Python", f"{report['python']} on {report['platform']}"
    quick = ", the quick cases alone" if report["quick"] else ""
    yield "run", f"profile {report['profile']}, seed {report['seed']}{quick}"
    if report["shard"]:
        yield "shard", f"{report['shard']['index']} of {report['shard']['count']}"
    if report["merged_from"]:
        yield "merged from", f"{report['merged_from']} shards"
    if report["evidence_of_backend"]:
        yield "the adapter's word", report["evidence_of_backend"]
    yield "ended", report["finished_at"]
    yield "took", f"{report['duration_s']:.1f} s"
