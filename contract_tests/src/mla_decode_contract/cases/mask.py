"""MASK: which keys each token of a block sees."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mla_decode.errors import MaskError
from mla_decode.mask import Mask
from mla_decode_contract.call import check, decode, forward, units_apart
from mla_decode_contract.cases.common import (
    CAUSAL,
    NON_CAUSAL,
    block_problem,
    longer_block,
    serve,
)
from mla_decode_contract.demand import demand_error, demand_refusal
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import DeclaredUnsupported, require

if TYPE_CHECKING:
    from mla_decode.problem import DecodeProblem
    from mla_decode_contract.context import CaseContext

TINY = 10
"""Keys of the tiny context: one key is a tenth of the answer."""
FAR_UNITS = 40.0
"""Two masks on the tiny context are at least this far apart."""
ALONE = {True: (3, 5, 7), False: (3, 5, 6, 7)}
"""Block lengths with a case of their own, by whether the mask is causal."""
LONGEST = 16
"""Tokens of the longest block that is walked; the limit has a case of its own."""
FEW_HEADS = 4
MOST_ROWS = 1024
"""Of a block that is walked: simulators need seconds for more."""


@implements("mask.causal.tail_aligned")
def tail_aligned(ctx: CaseContext) -> None:
    """A causal block of 2 over ten keys."""
    serve(ctx, block_problem(ctx, 2, causal=True), [TINY])


@implements("mask.causal.row0_hides_sibling")
def row0_hides_sibling(ctx: CaseContext) -> None:
    """Row 0 equals the oracle over the sequence without the last key."""
    scene = draw_scene(ctx, block_problem(ctx, 2, causal=True), [TINY])
    result = decode(scene)
    shorter, _ = scene.truth(
        q=scene.q[:1],
        seq_lens=torch.tensor([TINY - 1]),
        query_start_loc=torch.tensor([0, 1]),
    )
    whole, _ = scene.truth(causal=False)
    apart = units_apart(scene, result.out[:1], shorter)
    require(
        apart <= ctx.budget_units,
        f"row 0 is {apart:.3g} units from the step without its sibling",
    )
    leaked = units_apart(scene, result.out[:1], whole[:1])
    require(leaked > FAR_UNITS, "row 0 sees its sibling's key under the causal mask")


@implements("mask.causal.block_is_whole_sequence")
def block_is_whole_sequence(ctx: CaseContext) -> None:
    """seq_len == Q."""
    query_len = longer_block(ctx, causal=True, wanted=4)
    serve(ctx, block_problem(ctx, query_len, causal=True), [query_len, query_len])


def _block(query_len: int, *, causal: bool) -> None:
    kind = "causal" if causal else "non_causal"

    @implements(f"mask.{kind}.block_{query_len}")
    def run(ctx: CaseContext) -> None:
        problem = block_problem(ctx, query_len, causal=causal)
        serve(ctx, problem, [TINY, 7, 33], causal=causal)


for _causal, _lengths in ALONE.items():
    for _length in _lengths:
        _block(_length, causal=_causal)


@implements("mask.causal.every_block")
def every_causal_block(ctx: CaseContext) -> None:
    """Lengths without a case of their own."""
    _every_block(ctx, causal=True)


@implements("mask.non_causal.every_block")
def every_non_causal_block(ctx: CaseContext) -> None:
    """Lengths without a case of their own."""
    _every_block(ctx, causal=False)


def _every_block(ctx: CaseContext, *, causal: bool) -> None:
    """A small request for each length, with a problem and a builder of its own."""
    mask = Mask.CAUSAL if causal else Mask.NON_CAUSAL
    allowed = ctx.row.query_lens.get(mask, ())
    left = (n for n in range(4, LONGEST + 1) if n not in ALONE[causal])
    lengths = [length for length in left if length in allowed] or [2]
    absent: list[DeclaredUnsupported] = []
    large: list[str] = []
    for query_len in lengths:
        try:
            problem = _small_problem(ctx, query_len, causal=causal)
        except DeclaredUnsupported as unsupported:
            absent.append(unsupported)
            continue
        if query_len * problem.num_q_heads > MOST_ROWS:
            large.append(str(query_len))
            continue
        scene = draw_scene(ctx, problem, [query_len + 1], causal=causal)
        check(scene, decode(scene), label=f"{mask.value} block of {query_len}: ")
    if large:
        ctx.notes.append(f"not walked, too many rows: blocks of {', '.join(large)}")
    if len(absent) == len(lengths):
        raise absent[0]
    for one in absent:
        demand_refusal(ctx, one.problem, one.codes)


def _small_problem(ctx: CaseContext, query_len: int, *, causal: bool) -> DecodeProblem:
    try:
        return block_problem(ctx, query_len, causal=causal, num_q_heads=FEW_HEADS)
    except DeclaredUnsupported:
        return block_problem(ctx, query_len, causal=causal)


@implements("mask.non_causal.sees_siblings")
def sees_siblings(ctx: CaseContext) -> None:
    """A non-causal block of 2 over ten keys."""
    serve(ctx, block_problem(ctx, 2, causal=False), [TINY], causal=False)


@implements("mask.non_causal.row0_differs_from_causal")
def row0_differs(ctx: CaseContext) -> None:
    """Row 0 is far from its causal value: the mask is not quietly causal."""
    query_len = longer_block(ctx, causal=False)
    problem = block_problem(ctx, query_len, causal=False)
    scene, result = serve(ctx, problem, [TINY], causal=False)
    masked, _ = scene.truth(causal=True)
    apart = units_apart(scene, result.out[:1], masked[:1])
    ctx.notes.append(f"row 0 is {apart:.3g} units from its causal value")
    require(apart > FAR_UNITS, f"row 0 is the causal one within {apart:.3g} units")


@implements("mask.one_token_is_both")
def one_token_is_both(ctx: CaseContext) -> None:
    """Q = 1 under both spellings, on one problem."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [TINY, 33])
    causal = decode(scene)
    check(scene, causal)
    other = replace(scene, common=scene.with_common(causal=False))
    check(other, decode(other), label="causal=False ")


@implements("mask.does_not_stick")
def does_not_stick(ctx: CaseContext) -> None:
    """One builder, three builds, two masks."""
    query_len = longer_block(ctx, causal=False)
    problem = ctx.problem(query_lens=(query_len,), masks=(*CAUSAL, *NON_CAUSAL))
    builder = ctx.builder(problem)
    for causal in (True, False, True):
        scene = draw_scene(ctx, problem, [TINY, 17], causal=causal)
        check(scene, decode(scene, builder), label=f"causal={causal} ")


@implements("mask.flag_spellings")
def flag_spellings(ctx: CaseContext) -> None:
    """The forms in which engines hand a mask over."""
    query_len = longer_block(ctx, causal=True)
    allowed = ctx.row.query_lens.get(CAUSAL[0], ())
    problem = ctx.problem(query_lens=(query_len if query_len in allowed else 1,))
    scene = draw_scene(ctx, problem, [TINY, 12])
    builder = ctx.builder(problem)
    for flag in (
        True,
        np.bool_(True),
        torch.tensor(True),
        torch.ones(2, dtype=torch.bool),
    ):
        metadata = builder.build(scene.with_common(causal=flag))
        require(metadata.causal is True, f"causal={flag!r} was recorded otherwise")
        check(scene, decode(scene, metadata=metadata), label=f"{type(flag).__name__} ")


@implements("mask.flag_refused")
def flag_refused(ctx: CaseContext) -> None:
    """Flags that name no mask."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [TINY, 12])
    builder = ctx.builder(problem)
    flags: list[Any] = [
        torch.tensor([True, False]),
        torch.ones(0, dtype=torch.bool),
        torch.tensor(1.0),
        None,
        0,
        "causal",
    ]
    if ctx.torch_device.type != "cpu":
        flags.append(torch.tensor(True, device=ctx.torch_device))
    for flag in flags:
        common = scene.with_common(causal=flag)
        demand_error(MaskError, f"causal={flag!r}", partial(builder.build, common))
    result = forward(scene, builder.build(scene.common))
    check(scene, result, label="afterwards ")
