"""What changed between two reports of one backend, and whether it got worse."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mla_decode_contract.limits import LimitChange, limit_changes
from mla_decode_contract.outcome import Outcome
from mla_decode_contract.reading import ReportProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Report = Mapping[str, Any]

RANKS = {
    Outcome.PASSED.value: 3,
    Outcome.REFUSED.value: 2,
    Outcome.KNOWN_FAILURE.value: 1,
    Outcome.NEEDS_HARDWARE.value: 1,
    Outcome.NOT_RUN.value: 1,
    Outcome.FAILED.value: 0,
}
"""How much an outcome shows of the backend; less than before is worse."""
SLOWER_FACTOR, SLOWER_S = 2.0, 0.5
"""A case is listed as slower past both; timings never make a report worse."""


class NotComparable(ReportProblem):
    """Two reports say nothing of each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseChange:
    """A case whose outcome is another; None where a report has not the case."""

    case: str
    clause: str
    was: str | None
    now: str | None
    provisional: bool
    """Whether the newer report (the older, where the case is gone) left it out."""
    message: str = ""
    """Why it fails now."""
    repeat: str | None = None
    """The command that shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Something of the identity that is another: a version, the evidence, a device."""

    what: str
    was: str | None
    now: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slower:
    """A case that takes longer."""

    case: str
    was_s: float
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that changed from the older report to the newer one."""

    verdict_was: str
    verdict_now: str
    is_verdict_worse: bool
    worse: tuple[CaseChange, ...]
    better: tuple[CaseChange, ...]
    new: tuple[CaseChange, ...]
    gone: tuple[CaseChange, ...]
    limits: tuple[LimitChange, ...]
    drift: tuple[Drift, ...]
    slower: tuple[Slower, ...]
    duration_was_s: float
    duration_now_s: float

    @property
    def is_worse(self) -> bool:
        """Whether less is shown or declared than before.

        A case that shows less or is gone, a limit that is narrower, or a verdict with
        a worse exit status. Provisional cases and timings do not count.
        """
        counted = [c for c in (*self.worse, *self.gone) if not c.provisional]
        narrower = any(change.is_narrower for change in self.limits)
        return bool(counted) or narrower or self.is_verdict_worse

    def as_dict(self) -> dict[str, Any]:
        """The form that ``diff --json`` prints."""
        plain = asdict(self)
        for name in ("worse", "better", "new", "gone", "limits", "drift", "slower"):
            plain[name] = list(plain[name])
        return {"is_worse": self.is_worse, **plain}


def compare(old: Report, new: Report) -> Difference:
    """Compare two reports, as `read_report` gives them.

    Raises:
        NotComparable: They are of two backends or architectures, or one is of a shard
            or a mutant.
    """
    _require_comparable(old, new)
    before = {case["id"]: case for case in old["cases"]}
    after = {case["id"]: case for case in new["cases"]}
    both = [_change(before[c], after[c]) for c in before if c in after]
    changed = [change for change in both if change.was != change.now]
    return Difference(
        verdict_was=old["verdict"],
        verdict_now=new["verdict"],
        is_verdict_worse=_severity(new["exit_code"]) > _severity(old["exit_code"]),
        worse=tuple(c for c in changed if _rank(c.now) < _rank(c.was)),
        better=tuple(c for c in changed if _rank(c.now) >= _rank(c.was)),
        new=tuple(_change(None, after[c]) for c in after if c not in before),
        gone=tuple(_change(before[c], None) for c in before if c not in after),
        limits=tuple(limit_changes(old["declared"], new["declared"])),
        drift=tuple(_drift(old, new)),
        slower=tuple(_slower(before, after)),
        duration_was_s=old["duration_s"],
        duration_now_s=new["duration_s"],
    )


def _require_comparable(old: Report, new: Report) -> None:
    for report in (old, new):
        shard = report["shard"]
        if shard is not None and shard["count"] > 1:
            raise NotComparable(
                "A shard is a part of a report",
                got=f"shard {shard['index']}/{shard['count']}",
                allowed="whole reports",
                fix="`merge` the shards first.",
            )
        if report["mutant"] is not None:
            raise NotComparable(
                "A report of a mutant says nothing of the backend",
                got=report["mutant"],
                allowed="reports of the backend itself",
                fix="Run it without --mutant.",
            )
    for what, left, right in (
        ("backends", old["adapter"]["backend"], new["adapter"]["backend"]),
        ("architectures", old["device"]["arch"], new["device"]["arch"]),
    ):
        if left != right:
            raise NotComparable(
                f"The reports are of two {what}",
                got=f"{left} and {right}",
                allowed="one",
                fix="Compare runs of the same adapter on the same architecture.",
            )


def _change(before: Report | None, after: Report | None) -> CaseChange:
    case = after or before or {}
    failure = after["failure"] if after is not None else None
    return CaseChange(
        case=case["id"],
        clause=case["clause"],
        was=before["outcome"] if before is not None else None,
        now=after["outcome"] if after is not None else None,
        provisional=case["provisional"],
        message=failure["message"] if failure is not None else "",
        repeat=after["repeat"] if after is not None else None,
    )


def _rank(outcome: str | None) -> int:
    return RANKS[str(outcome)]


def _severity(exit_code: int) -> int:
    """Exit statuses by what they say: conformant, incomplete, failed."""
    return {0: 0, 3: 1, 1: 2}[exit_code]


def _drift(old: Report, new: Report) -> Iterator[Drift]:
    before, after = _identity(old), _identity(new)
    for what in dict.fromkeys((*before, *after)):
        was, now = before.get(what), after.get(what)
        if was != now:
            yield Drift(what=what, was=was, now=now)


def _identity(report: Report) -> dict[str, str | None]:
    adapter = report["adapter"]
    plain = {
        **{f"library {name}": text for name, text in report["libraries"].items()},
        "adapter": adapter["version"],
        "adapter's commit": adapter["commit"],
        "contract": report["contract"]["core"],
        "adapter's contract": report["contract"]["adapter"],
        "core": report["core"]["version"],
        "kit": report["kit"]["version"],
        "quick": str(report["quick"]).lower(),
        "seed": str(report["seed"]),
        "tolerances": ", ".join(
            f"{t['case']} {t['units']:g}" for t in report["tolerances"]
        ),
    }
    keys = ("evidence", "device_name", "driver", "runtime", "torch", "python")
    return {**plain, **{key: report[key] for key in keys}}


def _slower(before: Report, after: Report) -> Iterator[Slower]:
    for case_id in before:
        if case_id in after:
            was, now = (side[case_id]["duration_s"] for side in (before, after))
            if now > was * SLOWER_FACTOR and now - was > SLOWER_S:
                yield Slower(case=case_id, was_s=was, now_s=now)
