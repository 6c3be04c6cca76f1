"""Every exact rewrite of a block, as candidates for the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mla_decode.lowering.plan import Rewrite
from mla_decode.mask import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode.capability import IntSet
    from mla_decode.problem import DecodeProblem

PAD_WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128)
"""Head counts that folded rows are padded to: the widths that MLA kernels have."""


def native(problem: DecodeProblem, query_len: int, mask: Mask) -> Rewrite:
    """The block as it stands, alone."""
    alone = replace(problem, query_lens=frozenset({query_len}), masks=frozenset({mask}))
    return Rewrite(
        query_len=query_len, mask=mask, group=query_len, lowered=alone, is_native=True
    )


def rewrites(
    problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: IntSet
) -> Iterator[Rewrite]:
    """Every exact rewrite of a block, the fewest virtual requests first.

    Only head counts in `num_q_heads`, what the backend admits, are worth a candidate.
    A causal block only splits into one-token rows, each with its own length: a fold
    would show every token the keys of the last one.
    """
    if query_len == 1:
        yield from _folds(problem, 1, mask, num_q_heads, group=1)
        return
    is_causal = mask is Mask.CAUSAL
    if not is_causal:
        yield from _folds(problem, query_len, mask, num_q_heads, group=query_len)
    yield from _larger_blocks(problem, query_len, mask, num_q_heads)
    for group in (1,) if is_causal else _groups(query_len)[1:]:
        yield from _folds(problem, query_len, mask, num_q_heads, group=group)


def _groups(query_len: int) -> list[int]:
    """The smallest group for each number of virtual requests, the fewest first.

    A larger group of as many virtual requests only adds pad tokens, and pads to a
    width are rewrites of their own.
    """
    sizes = {-(-query_len // virtual) for virtual in range(1, query_len + 1)}
    return sorted(sizes, reverse=True)


def _folds(
    problem: DecodeProblem,
    query_len: int,
    mask: Mask,
    num_q_heads: IntSet,
    *,
    group: int,
) -> Iterator[Rewrite]:
    """Groups of tokens as heads of one token, padded to a kernel's width."""
    num_virtual = -(-query_len // group)
    heads = group * problem.num_q_heads
    for width in _widths(heads, num_q_heads):
        if query_len == 1 and width == heads:
            continue
        yield Rewrite(
            query_len=query_len,
            mask=mask,
            group=group,
            lowered=replace(
                problem,
                num_q_heads=width,
                query_lens=frozenset({1}),
                masks=frozenset({Mask.CAUSAL}),
                max_num_reqs=problem.max_num_reqs * num_virtual,
            ),
            pad_tokens=num_virtual * group - query_len,
            pad_heads=width - heads,
        )


def _larger_blocks(
    problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: IntSet
) -> Iterator[Rewrite]:
    """The block with heads added, or with tokens, up to the next power of two.

    Tokens only where nothing is masked: a causal block is aligned to its tail.
    """
    heads = problem.num_q_heads
    shapes = [(query_len, width) for width in _widths(heads, num_q_heads)]
    if mask is Mask.NON_CAUSAL and heads in num_q_heads:
        longest = min(1 << query_len.bit_length(), problem.max_model_len)
        shapes += [(padded, heads) for padded in range(query_len + 1, longest + 1)]
    for padded, width in shapes:
        if (padded, width) == (query_len, heads):
            continue
        yield Rewrite(
            query_len=query_len,
            mask=mask,
            group=query_len,
            lowered=replace(
                problem,
                num_q_heads=width,
                query_lens=frozenset({padded}),
                masks=frozenset({mask}),
            ),
            pad_tokens=padded - query_len,
            pad_heads=width - heads,
        )


def _widths(heads: int, allowed: IntSet) -> Iterator[int]:
    wider = (width for width in PAD_WIDTHS if width > heads)
    yield from (width for width in (heads, *wider) if width in allowed)
