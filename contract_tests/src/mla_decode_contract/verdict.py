"""From outcomes to one verdict: only what was run and held is conformant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_decode_contract.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from mla_decode_contract.outcome import CaseResult
    from mla_decode_contract.shard import Shard

EXIT_CONFORMANT = 0
EXIT_FAILED = 1
EXIT_INCOMPLETE = 3
EXIT_USAGE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run proves."""

    word: str
    """``conformant (simulated)``, ``not conformant (...)``, ``INCOMPLETE (...)``."""
    exit_code: int
    counts: dict[str, int]
    """Cases that count, by outcome."""
    provisional: dict[str, int]
    """The others by outcome: they are new in this contract minor."""
    not_run: tuple[str, ...]
    """Ids that make the run incomplete."""


def judge(
    results: Mapping[str, CaseResult],
    *,
    evidence: str,
    profile: str,
    is_quick: bool,
    provisional: Collection[str] = (),
    shard: Shard | None = None,
) -> Verdict:
    """Judge a run from the result of every case that was due.

    Args:
        results: One result for each case of the run's kind; NOT_RUN where none came.
        evidence: The evidence word.
        profile: ``cpu`` or ``device``.
        is_quick: Whether only the quick cases were due.
        provisional: Ids that are reported and not counted.
        shard: The part of the cases that was due; None: all.
    """
    counted = {c: r for c, r in results.items() if c not in provisional}
    counts = _by_outcome(counted.values())
    new = _by_outcome(r for c, r in results.items() if c in provisional)
    missing = [
        case_id
        for case_id, result in counted.items()
        if result.outcome is Outcome.NOT_RUN
        or (result.outcome is Outcome.NEEDS_HARDWARE and profile == "device")
    ]
    words = [evidence or "nothing ran", *(["quick"] if is_quick else [])]
    known = counts[Outcome.KNOWN_FAILURE.value]
    spoken = counts[Outcome.PASSED.value] + counts[Outcome.REFUSED.value]
    is_part = shard is not None and shard.count > 1
    if counts[Outcome.FAILED.value]:
        word, code = "not conformant", EXIT_FAILED
    elif missing or is_part or not spoken:
        word, code = "INCOMPLETE", EXIT_INCOMPLETE
    else:
        word, code = "conformant", EXIT_CONFORMANT
    if known and code != EXIT_FAILED and not missing and spoken:
        words.append(f"except {known} known failure{'s' if known > 1 else ''}")
    if is_part:
        held = code == EXIT_INCOMPLETE and not missing
        words.append(f"shard {shard}{', which held' if held else ''}")
    if failed := new[Outcome.FAILED.value]:
        words.append(f"{failed} provisional failed")
    return Verdict(
        word=f"{word} ({', '.join(words)})",
        exit_code=code,
        counts=counts,
        provisional=new,
        not_run=tuple(missing),
    )


def _by_outcome(results: Iterable[CaseResult]) -> dict[str, int]:
    found = Counter(result.outcome.value for result in results)
    return {outcome.value: found[outcome.value] for outcome in Outcome}
