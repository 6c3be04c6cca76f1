"""A shard: one part of the cases, for a fleet that runs the kit side by side."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_decode_contract.target import UsageProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_decode_contract.catalogue import Case

_FORM = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part ``index`` of ``count``; the parts together are the whole."""

    index: int
    """From 1."""
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``I/N``, as ``2/4``.

        Raises:
            UsageProblem: It is of another form, or no part of the whole.
        """
        found = _FORM.fullmatch(text)
        index, count = map(int, found.groups()) if found else (0, 0)
        if not 1 <= index <= count:
            raise UsageProblem(
                f"--shard {text!r} names no part of a whole; allowed is I/N with "
                "1 <= I <= N: the shards of a fleet of four are 1/4, 2/4, 3/4 and 4/4"
            )
        return cls(index=index, count=count)

    def part(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        """The shard's cases, in the order of the whole.

        Cases are dealt in the order of their ids' digests: neighbours, which take
        similar times, go to different shards, and sizes differ by one at most. The
        same cases give the same parts on every machine.

        Raises:
            UsageProblem: There are more shards than cases.
        """
        if self.count > len(cases):
            raise UsageProblem(
                f"--shard {self} deals {len(cases)} cases over {self.count} shards; "
                f"allowed are at most {len(cases)}: use fewer shards"
            )
        dealt = sorted(cases, key=lambda case: _digest(case.id))
        mine = {case.id for case in dealt[self.index - 1 :: self.count]}
        return tuple(case for case in cases if case.id in mine)

    def __str__(self) -> str:
        """As it is written: ``2/4``."""
        return f"{self.index}/{self.count}"


def _digest(case_id: str) -> str:
    return hashlib.sha256(case_id.encode()).hexdigest()
