"""HEADS: any declared number of heads, padding inert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode_contract.call import check, decode
from mla_decode_contract.cases.common import serve
from mla_decode_contract.context import least, most
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext

MOST_HEADS = 128
ODD = (12, 20, 33, 3, 48, 5, 24, 40, 80, 96, 112)


@implements("heads.smallest")
def smallest(ctx: CaseContext) -> None:
    """The least of the row."""
    serve(ctx, ctx.problem(num_q_heads=least(ctx.row.num_q_heads)), [10, 45])


@implements("heads.largest")
def largest(ctx: CaseContext) -> None:
    """The most of the row, within `MOST_HEADS`."""
    allowed = [n for n in range(1, MOST_HEADS + 1) if n in ctx.row.num_q_heads]
    count = allowed[-1] if allowed else least(ctx.row.num_q_heads)
    serve(ctx, ctx.problem(num_q_heads=count), [10, 45])


@implements("heads.every_declared_power")
def every_power(ctx: CaseContext) -> None:
    """Each in one small batch."""
    powers = [1 << bit for bit in range(8)]
    for heads in (count for count in powers if count in ctx.row.num_q_heads):
        serve(ctx, ctx.problem(num_q_heads=heads), [10])


@implements("heads.around_multiples")
def around_multiples(ctx: CaseContext) -> None:
    """One less, one more and the multiple itself, each in one small batch."""
    near = [16 * n + more for n in range(1, 9) for more in (-1, 0, 1)]
    wanted = [count for count in (1, 2, 3, *near) if count <= MOST_HEADS]
    served = [count for count in wanted if count in ctx.row.num_q_heads]
    for heads in served or [least(ctx.row.num_q_heads)]:
        serve(ctx, ctx.problem(num_q_heads=heads), [10])
    ctx.notes.append(f"head counts: {', '.join(map(str, served))}")


@implements("heads.odd")
def odd(ctx: CaseContext) -> None:
    """The first odd count that the row declares."""
    heads = next((n for n in ODD if n in ctx.row.num_q_heads), ODD[0])
    serve(ctx, ctx.problem(num_q_heads=heads), [10, 45])


@implements("heads.rows_independent")
def rows_independent(ctx: CaseContext) -> None:
    """One head's query becomes NaN; every other head keeps its values."""
    problem = ctx.problem(num_q_heads=_two_or_more(ctx))
    scene = draw_scene(ctx, problem, [10, 45])
    check(scene, decode(scene), label="before ")
    clean_out, clean_lse = scene.truth()
    last = problem.num_q_heads - 1
    changed = torch.full((), torch.nan).to(scene.q.dtype)
    scene.q[:, last] = changed
    result = decode(scene)
    others = result.out[:, :last].cpu().double()
    require(
        bool(others.isfinite().all()),
        "a NaN in one head's query reached another head's output",
    )
    apart = (others - clean_out[:, :last]).abs().max()
    require(
        float(apart) <= 0.05 * float(clean_out.abs().max()),
        f"another head moved by {float(apart):.3g} when one head's query changed",
    )
    if result.lse is not None:
        apart = (result.lse[:, :last].cpu().double() - clean_lse[:, :last]).abs().max()
        require(float(apart) < 0.01, "another head's lse moved")


def _two_or_more(ctx: CaseContext) -> int:
    wanted = (16, 8, 2, 4, 32, 64, 128)
    allowed = ctx.row.num_q_heads
    return next((n for n in wanted if n in allowed), most(allowed))
