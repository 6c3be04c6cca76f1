"""Every exact rewrite of a block, as candidates for the planner."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

from mla_decode.capability import PAD_WIDTHS
from mla_decode.lowering.plan import Rewrite
from mla_decode.mask import Mask
from mla_decode.problem import DecodeProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode.capability import IntSet

_FIELDS = tuple(field.name for field in fields(DecodeProblem))
_READ_ALL = attrgetter(*_FIELDS)
_WRITE_EACH = [vars(DecodeProblem)[name].__set__ for name in _FIELDS]
_PLACES = {name: place for place, name in enumerate(_FIELDS)}


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
    for group, blocks in shapes(problem, query_len, mask, num_q_heads):
        for length, heads in blocks:
            yield rewrite_to(problem, query_len, mask, group, length, heads)


def rewrite_to(
    problem: DecodeProblem,
    query_len: int,
    mask: Mask,
    group: int,
    length: int,
    heads: int,
) -> Rewrite:
    """The rewrite of a block to one of its `shapes`.

    Args:
        problem: Of which it is a block.
        query_len: Tokens of the block.
        mask: Its mask.
        group: Tokens of the block in one virtual request.
        length: Tokens of the kernel's block; 1 where the group is folded.
        heads: The kernel's heads.
    """
    num_virtual, own_heads = -(-query_len // group), problem.num_q_heads
    if length == 1:
        mask_seen, tokens = Mask.CAUSAL, num_virtual * group
        own_heads *= group
    else:
        mask_seen, tokens = mask, length
    return Rewrite(
        query_len=query_len,
        mask=mask,
        group=group,
        lowered=_derived(
            problem,
            num_q_heads=heads,
            query_lens=frozenset((length,)),
            masks=frozenset((mask_seen,)),
            max_num_reqs=problem.max_num_reqs * num_virtual,
        ),
        pad_tokens=tokens - query_len,
        pad_heads=heads - own_heads,
    )


def shapes(
    problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: IntSet
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The shape of every exact rewrite of a block, the fewest virtual requests first.

    Only head counts in `num_q_heads`, what the backend admits, are worth a candidate.
    A causal block only splits into one-token rows, each with its own length: a fold
    would show every token the keys of the last one.

    Yields:
        The tokens of the block in one virtual request, and the (tokens, heads) that a
        kernel may be given for them. Numbers: most candidates are passed over by them.
    """
    heads = problem.num_q_heads
    if query_len == 1:
        yield 1, _wider(heads, 1, num_q_heads)
        return
    is_causal = mask is Mask.CAUSAL
    whole = _wider(heads, query_len, num_q_heads)
    if not is_causal:
        longer = _longer(problem, query_len) if heads in num_q_heads else []
        whole = _folds(query_len * heads, num_q_heads) + whole + longer
    yield query_len, whole
    for group in (1,) if is_causal else _groups(query_len)[1:]:
        yield group, _folds(group * heads, num_q_heads)


@lru_cache(maxsize=1024)
def _groups(query_len: int) -> tuple[int, ...]:
    """The smallest group for each number of virtual requests, the fewest first.

    A larger group of as many virtual requests only adds pad tokens, and pads to a
    width are rewrites of their own.
    """
    sizes = {-(-query_len // virtual) for virtual in range(1, query_len + 1)}
    return tuple(sorted(sizes, reverse=True))


def _folds(heads: int, allowed: IntSet) -> list[tuple[int, int]]:
    """A group of tokens as heads of one token, padded to a kernel's width."""
    return [(1, width) for width in _widths(heads, allowed)]


def _wider(heads: int, query_len: int, allowed: IntSet) -> list[tuple[int, int]]:
    """The block with heads added."""
    widths = _widths(heads, allowed)
    return [(query_len, width) for width in widths if width > heads]


def _longer(problem: DecodeProblem, query_len: int) -> list[tuple[int, int]]:
    """The block with tokens added, up to the next power of two.

    Only where nothing is masked: a causal block is aligned to its tail.
    """
    longest = min(1 << query_len.bit_length(), problem.max_model_len)
    heads = problem.num_q_heads
    return [(length, heads) for length in range(query_len + 1, longest + 1)]


@lru_cache(maxsize=1024)
def _widths(heads: int, allowed: IntSet) -> tuple[int, ...]:
    """The head count itself and what it may be padded to, where admitted."""
    wider = (width for width in PAD_WIDTHS if width > heads)
    return tuple(width for width in (heads, *wider) if width in allowed)


def _derived(problem: DecodeProblem, **changes: object) -> DecodeProblem:
    """The problem with other sizes, which are valid by construction.

    Validating a problem costs more than all else that a candidate costs the planner.
    """
    values = list(_READ_ALL(problem))
    for name, value in changes.items():
        values[_PLACES[name]] = value
    derived = object.__new__(DecodeProblem)
    for write, value in zip(_WRITE_EACH, values, strict=True):
        write(derived, value)
    return derived
