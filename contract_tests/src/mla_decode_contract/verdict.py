"""From outcomes to one verdict: only what was run and held is conformant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_decode_contract.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mla_decode_contract.outcome import CaseResult

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
    """Cases by outcome."""
    not_run: tuple[str, ...]
    """Ids that make the run incomplete."""


def judge(
    results: Mapping[str, CaseResult], *, evidence: str, profile: str, is_quick: bool
) -> Verdict:
    """Judge a run from the result of every case that was due.

    Args:
        results: One result for each case of the run's kind; NOT_RUN where none came.
        evidence: The evidence word.
        profile: ``cpu`` or ``device``.
        is_quick: Whether only the quick cases were due.
    """
    counts = Counter(result.outcome.value for result in results.values())
    missing = [
        case_id
        for case_id, result in results.items()
        if result.outcome is Outcome.NOT_RUN
        or (result.outcome is Outcome.NEEDS_HARDWARE and profile == "device")
    ]
    words = [evidence or "nothing ran", *(["quick"] if is_quick else [])]
    known = counts[Outcome.KNOWN_FAILURE.value]
    spoken = counts[Outcome.PASSED.value] + counts[Outcome.REFUSED.value]
    if counts[Outcome.FAILED.value]:
        word, code = "not conformant", EXIT_FAILED
    elif missing or not spoken:
        word, code = "INCOMPLETE", EXIT_INCOMPLETE
    else:
        word, code = "conformant", EXIT_CONFORMANT
        if known:
            words.append(f"except {known} known failure{'s' if known > 1 else ''}")
    return Verdict(
        word=f"{word} ({', '.join(words)})",
        exit_code=code,
        counts={outcome.value: counts[outcome.value] for outcome in Outcome},
        not_run=tuple(missing),
    )
