"""DCP: a request's keys dealt over ranks, partial results merged by lse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mla_decode.dcp import local_seq_lens
from mla_decode.mask import Mask
from mla_decode.problem import Dcp
from mla_decode_contract.call import Result, check, decode
from mla_decode_contract.cases.common import longer_block
from mla_decode_contract.demand import demand_refusal
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import ValueViolation, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mla_decode_contract.context import CaseContext

WORLD = 2
WIDE_WORLD = 8


@implements("dcp.ranks_merge")
def ranks_merge(ctx: CaseContext) -> None:
    """One token a turn, one-token rows."""
    _merge(ctx, [21, 64], interleave=1)


@implements("dcp.interleave")
def interleave(ctx: CaseContext) -> None:
    """Four tokens a turn; the last turn is cut short."""
    _merge(ctx, [22, 65, 4], interleave=4)


@implements("dcp.rank_without_keys")
def rank_without_keys(ctx: CaseContext) -> None:
    """One key in all: rank 1 has none."""
    _merge(ctx, [1, 21], interleave=1)


@implements("dcp.non_causal_block")
def non_causal_block(ctx: CaseContext) -> None:
    """Every token of the block sees all keys, wherever they lie."""
    query_len = longer_block(ctx, causal=False)
    _merge(ctx, [21, 64], interleave=1, query_len=query_len, causal=False)


@implements("dcp.eight_ranks")
def eight_ranks(ctx: CaseContext) -> None:
    """Ranks that hold one key more than others, and some that hold none."""
    _merge(ctx, [3, 45, 16], interleave=2, world=WIDE_WORLD)


@implements("dcp.local_shorter_than_block")
def local_shorter(ctx: CaseContext) -> None:
    """Two to five global keys: no rank holds as many as the block has tokens."""
    query_len = longer_block(ctx, causal=False, wanted=4)
    _merge(ctx, [2, 5, 3], interleave=1, query_len=query_len, causal=False)


@implements("dcp.local_lengths")
def local_lengths(ctx: CaseContext) -> None:
    """Core's formula against counting, then every length around a turn in one batch."""
    for turn in (1, 2, 4):
        for rank in range(WORLD):
            dcp = Dcp(world=WORLD, rank=rank, interleave=turn)
            totals = list(range(4 * WORLD * turn + 2))
            counted = local_lens(totals, rank, turn)
            given = [local_seq_lens(total, dcp) for total in totals]
            tensor = local_seq_lens(torch.tensor(totals), dcp).tolist()
            require(
                given == counted == tensor,
                f"local_seq_lens of rank {rank}, interleave {turn}: {given}; "
                f"counted: {counted}",
            )
    _merge(ctx, [1, 2, 3, 4, 5, 6, 7], interleave=2)


@implements("dcp.causal_block_refused")
def causal_block(ctx: CaseContext) -> None:
    """A local tail is not the global tail."""
    base = ctx.problem()
    problem = replace(
        base,
        dcp=Dcp(world=WORLD),
        query_lens=frozenset({3}),
        masks=frozenset({Mask.CAUSAL}),
    )
    demand_refusal(ctx, problem, {"dcp"})


def local_lens(
    lens: Sequence[int], rank: int, turn: int, world: int = WORLD
) -> list[int]:
    """Keys that a rank holds of each request, dealt round-robin in turns."""
    return [
        sum(1 for token in range(length) if token // turn % world == rank)
        for length in lens
    ]


def _merge(
    ctx: CaseContext,
    lens: Sequence[int],
    *,
    interleave: int,
    query_len: int = 1,
    causal: bool = True,
    world: int = WORLD,
) -> None:
    mask = Mask.CAUSAL if causal else Mask.NON_CAUSAL
    parts: list[tuple[Result, tuple[Tensor, Tensor]]] = []
    q: Tensor | None = None
    for rank in range(world):
        problem = ctx.problem(
            dcp=Dcp(world=world, rank=rank, interleave=interleave),
            query_lens=(query_len,),
            masks=(mask,),
            needs_lse=True,
        )
        held = local_lens(lens, rank, interleave, world)
        scene = draw_scene(ctx, problem, held, causal=causal, global_lens=lens)
        q = scene.q if q is None else q
        scene = replace(scene, q=q)
        result = decode(scene)
        truth = scene.truth(causal=False)
        check(scene, result, label=f"rank {rank} ")
        parts.append((result, truth))
    merged = _by_lse([(r.out.cpu().double(), _lse(r)) for r, _ in parts])
    whole = _by_lse([truth for _, truth in parts])
    apart = float((merged - whole).abs().max())
    ctx.notes.append(f"merged over {world} ranks: largest error {apart:.3g}")
    if not apart <= 0.02 * float(whole.abs().max()):
        raise ValueViolation(f"the merge over ranks is off by {apart:.3g}")


def _lse(result: Result) -> Tensor:
    if result.lse is None:
        raise ValueViolation("lse is None under DCP")
    return result.lse.cpu().double()


def _by_lse(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    lses = torch.stack([lse for _, lse in parts])
    weights = torch.softmax(lses, dim=0).nan_to_num(0.0)
    return (torch.stack([out for out, _ in parts]) * weights[..., None]).sum(0)
