"""REPEAT: the same inputs, the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mla_decode_contract.call import Result, check, decode
from mla_decode_contract.cases.common import CAUSAL, longer_block
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import ValueViolation, require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext
    from mla_decode_contract.scene import Scene

TIMES = 4


@implements("repeat.bit_equal")
def bit_equal(ctx: CaseContext) -> None:
    """One builder, one metadata."""
    scene = draw_scene(ctx, ctx.problem(), [20, 0, 300])
    metadata = ctx.builder(scene.problem).build(scene.common)
    _compare(ctx, [decode(scene, metadata=metadata) for _ in range(TIMES)])
    check(scene, decode(scene, metadata=metadata))


@implements("repeat.across_builders")
def across_builders(ctx: CaseContext) -> None:
    """A builder each."""
    scene = draw_scene(ctx, ctx.problem(), [20, 0, 300])
    _compare(ctx, [decode(scene) for _ in range(2)])


@implements("repeat.batch_invariant")
def batch_invariant(ctx: CaseContext) -> None:
    """One batch of four, requests alone, two of them, and all in reverse."""
    problem = ctx.problem(batch_invariant=True)
    scene = draw_scene(ctx, problem, [140, 20, 0, 65])
    builder = ctx.builder(problem)
    whole = decode(scene, builder)
    check(scene, whole)
    for requests in ([0], [1], [0, 3], [3, 2, 1, 0]):
        part = decode(_part(scene, requests), builder)
        rows = [scene.starts[request] for request in requests]
        _demand_bits(whole, rows, part, f"requests {requests} of a batch of 4")


@implements("repeat.block_invariant")
def block_invariant(ctx: CaseContext) -> None:
    """Blocks of two requests, and each of their tokens as a step of its own."""
    query_len = longer_block(ctx, causal=True)
    problem = ctx.problem(query_lens=(1, query_len), masks=CAUSAL, batch_invariant=True)
    scene = draw_scene(ctx, problem, [65, 20])
    builder = ctx.builder(problem)
    whole = decode(scene, builder)
    check(scene, whole)
    for token in range(query_len):
        part = decode(_part(scene, [0, 1], token), builder)
        rows = [start + token for start in scene.starts[:2]]
        _demand_bits(whole, rows, part, f"token {token} of blocks of {query_len}")


def _part(scene: Scene, requests: list[int], token: int | None = None) -> Scene:
    """Some requests of a batch of whole blocks as a batch, or one token of each."""
    block = scene.problem.max_query_len
    first, length = (0, block) if token is None else (token, 1)
    hidden = block - first - length
    lens = [max(0, scene.seq_lens[request] - hidden) for request in requests]
    starts = torch.arange(len(requests) + 1, dtype=torch.int32) * length
    rows = [
        scene.starts[request] + first + offset
        for request in requests
        for offset in range(length)
    ]
    device = scene.ctx.torch_device
    chosen = torch.tensor(requests, device=device)
    common = scene.with_common(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        num_reqs=len(requests),
        num_actual_tokens=len(rows),
        max_query_len=length,
        max_seq_len=max(lens),
        block_table_tensor=scene.common.block_table_tensor[chosen],
    )
    return replace(
        scene,
        common=common,
        q=scene.q[torch.tensor(rows, device=device)],
        seq_lens=tuple(lens),
        block_lens=(length,) * len(requests),
        starts=tuple(starts.tolist()),
    )


def _demand_bits(whole: Result, rows: list[int], part: Result, what: str) -> None:
    for name in ("out", "lse"):
        mine, theirs = getattr(part, name), getattr(whole, name)
        if mine is not None and not _same(mine, theirs[rows]):
            raise ValueViolation(
                f"{what} have another {name}, bit by bit, than in the batch, and "
                "batch_invariance is declared"
            )


def _compare(ctx: CaseContext, results: list[Result]) -> None:
    first = results[0]
    equal = all(_same(first.out, other.out) for other in results[1:])
    if first.lse is not None:
        equal &= all(
            other.lse is not None and _same(first.lse, other.lse)
            for other in results[1:]
        )
    if not ctx.backend.deterministic:
        ctx.notes.append(f"declared not deterministic; bits were equal: {equal}")
        return
    require(equal, "the same inputs gave other bits, and deterministic is True")


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )
