"""Ten ways in which a backend can be wrong and still return numbers.

Each changes what an engine's layers get while it is entered; the engine stays up.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from mla_decode import MLADecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Mutant = Callable[[], contextlib.AbstractContextManager[None]]

_plan, _run = MLADecoder.plan, MLADecoder.run
MUTANTS: dict[str, Mutant] = {}


def _planned(mutate: Callable[..., Any]) -> None:
    """A mutant of `plan`: mutate(decoder, common) gives the plan."""
    MUTANTS[mutate.__name__.strip("_")] = _patched("plan", mutate)


def _ran(mutate: Callable[..., Any]) -> None:
    """A mutant of `run`: mutate(decoder, q, cache, plan, **scales) gives (out, lse)."""
    MUTANTS[mutate.__name__.strip("_")] = _patched("run", mutate)


def _patched(name: str, mutate: Callable[..., Any]) -> Mutant:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with patch.object(MLADecoder, name, mutate):
            yield

    return entered


@_planned
def verify_unmasked(decoder, common):
    plan = _plan(decoder, common)
    plan.causal = False
    return plan


@_planned
def draft_masked_causally(decoder, common):
    plan = _plan(decoder, common)
    plan.causal = True
    return plan


@_planned
def draft_without_siblings(decoder, common):
    if not common.causal:
        context = common.seq_lens - common.max_query_len
        common = replace(common, seq_lens=context.clamp(min=1))
    return _plan(decoder, common)


@_planned
def lengths_of_the_step_before(decoder, common):
    before = vars(decoder).get("lengths_before")
    decoder.lengths_before = common.seq_lens.clone()
    if before is not None and before.shape == common.seq_lens.shape:
        common = replace(common, seq_lens=torch.minimum(before, common.seq_lens))
    return _plan(decoder, common)


@_planned
def last_key_dropped(decoder, common):
    shorter = (common.seq_lens - 1).clamp(min=common.max_query_len)
    return _plan(decoder, replace(common, seq_lens=shorter))


@_planned
def tables_swapped(decoder, common):
    return _plan(
        decoder,
        replace(common, block_table_tensor=common.block_table_tensor.flip(0)),
    )


@_ran
def attention_zeroed(decoder, q, cache, plan, **scales):
    out, lse = _run(decoder, q, cache, plan, **scales)
    return torch.zeros_like(out), lse


@_ran
def scale_of_the_absorbed_width(decoder, q, cache, plan, **scales):
    scales["softmax_scale"] = 576**-0.5
    return _run(decoder, q, cache, plan, **scales)


@_ran
def rope_dropped(decoder, q, cache, plan, **scales):
    nope, rope = q
    return _run(decoder, (nope, torch.zeros_like(rope)), cache, plan, **scales)


@_ran
def rows_shifted(decoder, q, cache, plan, **scales):
    out, lse = _run(decoder, q, cache, plan, **scales)
    return out.roll(1, dims=0), lse
