"""Declared limits of two reports: which are another, which are narrower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode.capability import describe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mla_decode.capability import IntSet

YES = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChange:
    """A declared limit, or what is refused in the grid of shapes, before and now."""

    what: str
    was: str
    now: str
    is_narrower: bool
    """Whether something that was served or declared is no longer."""


def limit_changes(
    old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> Iterator[LimitChange]:
    """Compare what two reports say under ``declared``; nothing where one is silent."""
    if old is None or new is None:
        return
    before, after = old["row"], new["row"]
    for key in ("page_sizes", "num_q_heads"):
        yield from _numbers(key, before[key], after[key])
    for mask in dict.fromkeys((*before["query_lens"], *after["query_lens"])):
        sides = (row["query_lens"].get(mask, []) for row in (before, after))
        yield from _numbers(f"query_lens {mask}", *sides)
    for key in ("dtypes", "out_dtypes"):
        yield from _words(key, before[key], after[key])
    served = (
        [f for f, s in r["features"].items() if s == YES] for r in (before, after)
    )
    yield from _words("features", *served)
    for key in ("max_num_reqs", "max_model_len"):
        yield from _most(key, before[key], after[key])
    yield from _cells(old["cells"], new["cells"])


def _numbers(what: str, old: Any, new: Any) -> Iterator[LimitChange]:
    before, after = _int_set(old), _int_set(new)
    if old != new:
        yield LimitChange(
            what=what,
            was=describe(before),
            now=describe(after),
            is_narrower=not _is_inside(before, after),
        )


def _int_set(numbers: Any) -> IntSet:
    if isinstance(numbers, dict):
        step = numbers["step"]
        past = numbers["last"] + (1 if step > 0 else -1)
        return range(numbers["first"], past, step)
    return frozenset(numbers)


def _is_inside(inner: IntSet, outer: IntSet) -> bool:
    """Whether every number of one is in the other; long ranges are not walked."""
    if isinstance(inner, range) and isinstance(outer, range) and len(inner):
        ends_fit = inner[0] in outer and inner[-1] in outer
        return ends_fit and (len(inner) == 1 or inner.step % outer.step == 0)
    return len(inner) <= len(outer) and all(number in outer for number in inner)


def _words(what: str, old: Any, new: Any) -> Iterator[LimitChange]:
    before, after = ({_word(item) for item in side} for side in (old, new))
    if before != after:
        yield LimitChange(
            what=what,
            was=describe(before),
            now=describe(after),
            is_narrower=not before <= after,
        )


def _word(item: Any) -> str:
    return item if isinstance(item, str) else "/".join(item)


def _most(what: str, old: int | None, new: int | None) -> Iterator[LimitChange]:
    if old != new:
        yield LimitChange(
            what=what,
            was=str(old or "no limit"),
            now=str(new or "no limit"),
            is_narrower=new is not None and (old is None or new < old),
        )


def _cells(old: Any, new: Any) -> Iterator[LimitChange]:
    """Shapes whose answer is another: the row may be as it was."""
    before, after = ({_shape(c): c["refused"] for c in side} for side in (old, new))
    for shape in before:
        if shape in after and bool(before[shape]) != bool(after[shape]):
            yield LimitChange(
                what=shape,
                was=_answer(before[shape]),
                now=_answer(after[shape]),
                is_narrower=bool(after[shape]),
            )


def _shape(cell: Mapping[str, Any]) -> str:
    return f"{cell['num_q_heads']} heads, {cell['mask']} block of {cell['query_len']}"


def _answer(codes: list[str]) -> str:
    return f"refused: {', '.join(codes)}" if codes else "accepted"
