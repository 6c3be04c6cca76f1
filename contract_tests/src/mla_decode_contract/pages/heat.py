"""The heat map: heads by query length, a map for each mask, from answers and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MASKS = ("causal", "non_causal")
LEVELS = 5
"""Shades of a measured cell, by the part of its budget that was used."""

Shape = tuple[int, int, str]
"""Heads, query length, mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One shape: what the backend answers for it, and the worst that was measured."""

    state: str
    """``measured``, ``over`` (past its budget), ``accepted`` (and not measured),
    ``refused``, or ``unknown`` where the report says nothing."""
    text: str
    """The worst units, or a word; never empty, for who sees no colour."""
    level: int = 0
    """The shade of a measured cell: 0 to `LEVELS` - 1."""
    about: str = ""
    """A sentence: cases or codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """One mask's map."""

    mask: str
    query_lens: tuple[int, ...]
    """The columns."""
    rows: tuple[tuple[int, tuple[Cell, ...]], ...]
    """Heads with their cells."""


def heat_maps(report: dict[str, Any]) -> tuple[HeatMap, ...]:
    """The maps of the masks of which the report says anything.

    Args:
        report: Keeps the schema; one of schema 1.0 has no maps.
    """
    answers = _answers(report)
    worst = _worst(report)
    shapes = answers.keys() | worst.keys()
    maps = []
    for mask in MASKS:
        heads = sorted({h for h, _, m in shapes if m == mask})
        lens = tuple(sorted({q for _, q, m in shapes if m == mask}))
        rows = tuple(
            (h, tuple(_cell((h, q, mask), answers, worst) for q in lens)) for h in heads
        )
        if rows:
            maps.append(HeatMap(mask=mask, query_lens=lens, rows=rows))
    return tuple(maps)


def _answers(report: dict[str, Any]) -> dict[Shape, list[str]]:
    """Codes of refusal by shape; none: accepted."""
    declared = report["declared"] or {"cells": []}
    return {
        (cell["num_q_heads"], cell["query_len"], cell["mask"]): cell["refused"]
        for cell in declared["cells"]
    }


def _worst(report: dict[str, Any]) -> dict[Shape, tuple[dict[str, Any], set[str]]]:
    """The measurement that used most of its budget, and the cases that measured."""
    found: dict[Shape, tuple[dict[str, Any], set[str]]] = {}
    for shape, case_id, measured in _measured(report):
        known, cases = found.get(shape, (measured, set()))
        used = measured["units"] / measured["budget"]
        if used > known["units"] / known["budget"]:
            known = measured
        found[shape] = (known, cases | {case_id})
    return found


def _measured(report: dict[str, Any]) -> Iterator[tuple[Shape, str, dict[str, Any]]]:
    for case in report["cases"]:
        for measured in case["measurements"]:
            heads, query_len = measured.get("num_q_heads"), measured.get("query_len")
            mask = measured.get("mask")
            if heads is not None and query_len is not None and mask is not None:
                yield (heads, query_len, mask), case["id"], measured


def _cell(
    shape: Shape,
    answers: dict[Shape, list[str]],
    worst: dict[Shape, tuple[dict[str, Any], set[str]]],
) -> Cell:
    if shape in worst:
        measured, cases = worst[shape]
        used = measured["units"] / measured["budget"]
        about = f"{measured['quantity']} over {len(cases)} cases: {_listed(cases)}"
        text = f"{measured['units']:.2g}"
        if used > 1:
            return Cell(state="over", text=text, about=about)
        level = min(LEVELS - 1, int(used * LEVELS))
        return Cell(state="measured", text=text, level=level, about=about)
    codes = answers.get(shape)
    if codes is None:
        return Cell(state="unknown", text=" ", about="not asked")
    if codes:
        return Cell(state="refused", text="-", about=f"refused: {', '.join(codes)}")
    return Cell(state="accepted", text="yes", about="accepted, not measured")


def _listed(cases: set[str], most: int = 3) -> str:
    named = sorted(cases)
    more = len(named) - most
    return ", ".join(named[:most]) + (f" and {more} more" if more > 0 else "")
