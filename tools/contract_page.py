"""The cases of the contract kit, for the page that says what the contract is."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from mla_decode import CONTRACT_VERSION
from mla_decode_contract import CASES, Case, Clause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NEEDS = {
    "batch_invariance": "batch invariance",
    "bf16_fp8": "a bf16 query over an fp8 cache",
    "causal_block": "causal blocks",
    "dcp": "DCP",
    "fp16": "float16",
    "fp8": "fp8",
    "graphs": "graphs",
    "lse": "LSE",
    "non_causal": "non-causal blocks",
    "odd_heads": "head counts between multiples of 16",
    "page_size": "that page size",
    "page_stride": "a page stride",
}
"""Words for what a case needs; a new need is shown by its own name."""


def clause_table(clause: Clause) -> str:
    """A clause's cases: what each would catch, and since which contract minor."""
    lines = ["| case | since | what holds | needs |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{case.id}` | {_since(case)} | {_cell(case.purpose)} | {_needs(case)} |"
        for case in CASES
        if case.clause is clause
    ]
    return "\n".join(lines)


def counts() -> str:
    """How many cases there are, by the minor that they came with."""
    by_minor = Counter(case.since for case in CASES)
    new = sum(case.is_provisional(CONTRACT_VERSION) for case in CASES)
    told = ", ".join(
        f"{n} since {minor}" for minor, n in sorted(by_minor.items(), key=_by_number)
    )
    provisional = f"; {new} of them are provisional" if new else ""
    return (
        f"The kit has {len(CASES)} cases: {told}{provisional}. Where a backend declares "
        "what a case needs unsupported, the case demands the refusal instead."
    )


def _by_number(item: tuple[str, int]) -> tuple[int, ...]:
    return tuple(map(int, item[0].split(".")))


def _since(case: Case) -> str:
    new = case.is_provisional(CONTRACT_VERSION)
    return f"{case.since}, provisional" if new else case.since


def _needs(case: Case) -> str:
    return ", ".join(_words(case))


def _words(case: Case) -> Iterator[str]:
    if case.profile == "device":
        yield "the device itself"
    for feature in case.features:
        yield NEEDS.get(feature, f"`{feature}`")


def _cell(text: str) -> str:
    """Text in a table; names with underscores are code."""
    return re.sub(r"\w*_\w+", r"`\g<0>`", text).replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {
    "case-counts": counts,
    **{f"cases-{clause}": partial(clause_table, clause) for clause in Clause},
}
