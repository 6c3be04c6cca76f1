"""What the demo's figures mean: acceptance, repeats, and where two texts part."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GRAM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How much of the drafted blocks the target accepted, under one mask."""

    per_block: float
    """Accepted draft tokens of a block, on average; the target's own token excluded."""
    by_position: tuple[float, ...]
    """Share of blocks in which the i-th drafted token was accepted: they add up to
    `per_block`."""
    num_blocks: int

    @property
    def tokens_per_target_pass(self) -> float:
        """Accepted tokens and the one that the target adds."""
        return self.per_block + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first token at which two ways of generating part, for one prompt."""

    prompt: int
    position: int
    margin: float
    """By how much the plain choice had won there: a near tie if tiny."""


def acceptance(accepted: Iterable[Sequence[int]], draft_len: int) -> Acceptance:
    """Sum up blocks.

    Args:
        accepted: For each prompt, the accepted draft tokens of each of its blocks.
        draft_len: Drafted tokens of a block.
    """
    counts = [count for blocks in accepted for count in blocks]
    share = 1 / max(1, len(counts))
    return Acceptance(
        per_block=sum(counts) * share,
        by_position=tuple(
            sum(count > slot for count in counts) * share for slot in range(draft_len)
        ),
        num_blocks=len(counts),
    )


def repeated_share(texts: Iterable[Sequence[object]]) -> float:
    """Share of 4-grams that the same text already held earlier.

    Args:
        texts: Sequences of tokens, or of words; each is its own text.
    """
    repeated = total = 0
    for text in texts:
        grams = Counter(
            tuple(text[at : at + GRAM]) for at in range(len(text) - GRAM + 1)
        )
        total += grams.total()
        repeated += grams.total() - len(grams)
    return repeated / max(1, total)


def divergences(
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    margins: Sequence[Sequence[float]],
) -> tuple[Divergence, ...]:
    """Find where texts part from the plain ones: nothing where all are identical."""
    return tuple(
        Divergence(prompt=prompt, position=position, margin=margins[prompt][position])
        for prompt, (ours, theirs) in enumerate(zip(plain, other, strict=True))
        for position in [
            at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b
        ][:1]
    )
