"""Every exact rewrite of a block, as candidates for the planner."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from mla_decode.capability import PAD_WIDTHS
from mla_decode.lowering.plan import Rewrite
from mla_decode.mask import Mask
from mla_decode.problem import DecodeProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode.capability import IntSet

_FIELDS = tuple(field.name for field in fields(DecodeProblem))


class Shape(NamedTuple):
    """A rewrite by its numbers: most candidates need no problem to be passed over."""

    num_virtual: int
    """Virtual requests of one request."""
    group: int
    """Tokens of the block in one of them."""
    query_len: int
    """Tokens of the kernel's block; 1 where the group is folded."""
    num_q_heads: int
    """The kernel's heads."""

    def rewrite(self, problem: DecodeProblem, query_len: int, mask: Mask) -> Rewrite:
        """The rewrite of a problem's block that has this shape."""
        group, num_virtual, heads = self.group, self.num_virtual, problem.num_q_heads
        if self.query_len == 1:
            mask_seen, tokens = Mask.CAUSAL, num_virtual * group
            heads *= group
        else:
            mask_seen, tokens = mask, self.query_len
        return Rewrite(
            query_len=query_len,
            mask=mask,
            group=group,
            lowered=_derived(
                problem,
                num_q_heads=self.num_q_heads,
                query_lens=frozenset((self.query_len,)),
                masks=frozenset((mask_seen,)),
                max_num_reqs=problem.max_num_reqs * num_virtual,
            ),
            pad_tokens=tokens - query_len,
            pad_heads=self.num_q_heads - heads,
        )


def native(problem: DecodeProblem, query_len: int, mask: Mask) -> Rewrite:
    """The block as it stands, alone."""
    alone = problem
    query_lens, masks = frozenset((query_len,)), frozenset((mask,))
    if (problem.query_lens, problem.masks) != (query_lens, masks):
        alone = _derived(problem, query_lens=query_lens, masks=masks)
    return Rewrite(
        query_len=query_len, mask=mask, group=query_len, lowered=alone, is_native=True
    )


def rewrites(
    problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: IntSet
) -> Iterator[Rewrite]:
    """Every exact rewrite of a block; see `shapes`."""
    for shape in shapes(problem, query_len, mask, num_q_heads):
        yield shape.rewrite(problem, query_len, mask)


def shapes(
    problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: IntSet
) -> Iterator[Shape]:
    """The shape of every exact rewrite of a block, the fewest virtual requests first.

    Only head counts in `num_q_heads`, what the backend admits, are worth a candidate.
    A causal block only splits into one-token rows, each with its own length: a fold
    would show every token the keys of the last one.
    """
    heads = problem.num_q_heads
    if query_len == 1:
        yield from _folds(heads, 1, 1, num_q_heads)
        return
    is_causal = mask is Mask.CAUSAL
    if not is_causal:
        yield from _folds(heads, query_len, query_len, num_q_heads)
    yield from _larger_blocks(problem, query_len, num_q_heads, is_causal=is_causal)
    for group in (1,) if is_causal else _groups(query_len)[1:]:
        yield from _folds(heads, query_len, group, num_q_heads)


@lru_cache(maxsize=1024)
def _groups(query_len: int) -> tuple[int, ...]:
    """The smallest group for each number of virtual requests, the fewest first.

    A larger group of as many virtual requests only adds pad tokens, and pads to a
    width are rewrites of their own.
    """
    sizes = {-(-query_len // virtual) for virtual in range(1, query_len + 1)}
    return tuple(sorted(sizes, reverse=True))


def _folds(
    num_q_heads: int, query_len: int, group: int, allowed: IntSet
) -> list[Shape]:
    """Groups of tokens as heads of one token, padded to a kernel's width."""
    num_virtual = -(-query_len // group)
    heads = group * num_q_heads
    return [
        Shape(num_virtual, group, 1, width)
        for width in _widths(heads, allowed)
        if query_len > 1 or width > heads
    ]


def _larger_blocks(
    problem: DecodeProblem, query_len: int, allowed: IntSet, *, is_causal: bool
) -> list[Shape]:
    """The block with heads added, or with tokens, up to the next power of two.

    Tokens only where nothing is masked: a causal block is aligned to its tail.
    """
    heads = problem.num_q_heads
    larger = [
        Shape(1, query_len, query_len, width)
        for width in _widths(heads, allowed)
        if width > heads
    ]
    if not is_causal and heads in allowed:
        longest = min(1 << query_len.bit_length(), problem.max_model_len)
        padded = range(query_len + 1, longest + 1)
        larger += [Shape(1, query_len, length, heads) for length in padded]
    return larger


@lru_cache(maxsize=1024)
def _widths(heads: int, allowed: IntSet) -> tuple[int, ...]:
    """The head count itself and what it may be padded to, where admitted."""
    wider = (width for width in PAD_WIDTHS if width > heads)
    return tuple(width for width in (heads, *wider) if width in allowed)


def _derived(problem: DecodeProblem, **changes: object) -> DecodeProblem:
    """The problem with other sizes, which are valid by construction.

    Validating a problem costs more than all else that a candidate costs the planner.
    """
    derived = object.__new__(DecodeProblem)
    for name in _FIELDS:
        value = changes[name] if name in changes else getattr(problem, name)
        object.__setattr__(derived, name, value)
    return derived
