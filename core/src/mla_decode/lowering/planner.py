"""The cheapest exact way in which a backend serves a problem."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from mla_decode.answers import answers_of
from mla_decode.lowering.plan import BlockPlan, Plan, Rewrite
from mla_decode.lowering.rewrites import native, rewrites, shapes
from mla_decode.mask import Mask
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode.workspace import ITEM_BYTES, core_bytes

if TYPE_CHECKING:
    from mla_decode.answers import Answers
    from mla_decode.backend import Backend
    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal

_ANY_HEADS = range(1, 1 << 20)
_LSE_BYTES = 4
_INDEX_BYTES = 4
_ROW_OF_BYTES = 8


def native_plan(problem: DecodeProblem, backend: Backend, device: DeviceInfo) -> Plan:
    """The plan of a backend that accepts the problem as it stands."""
    answers = answers_of(backend, device)
    blocks = [
        price(native(problem, query_len, mask), answers)
        for query_len, mask in problem.blocks()
    ]
    return _assemble(problem, blocks, answers)


def _assemble(
    problem: DecodeProblem, blocks: list[BlockPlan], answers: Answers
) -> Plan:
    """The plan of all blocks; those of one lowered problem share its inner builder."""
    if blocks[0].rewrite.lowered is problem:
        held = blocks[0].cost.workspace_bytes
    elif all(block.rewrite.is_native for block in blocks):
        held = answers.cost(problem).workspace_bytes
    else:
        inner = {
            block.rewrite.lowered: block.cost.workspace_bytes - block.copy_bytes
            for block in blocks
        }
        held = sum(inner.values())
        held += sum(core_bytes(lowered, joins=False) for lowered in inner)
        held += sum(block.copy_bytes for block in blocks)
    return Plan(problem=problem, blocks=tuple(blocks), workspace_bytes=held)


def plan_exact(
    problem: DecodeProblem, backend: Backend, device: DeviceInfo
) -> Plan | None:
    """The cheapest exact plan of every block, or None where a block has none.

    Blocks are planned apart: a causal verify may stay native beside a folded draft.
    Pure in the problem and the backend's answers, and cached by them.
    """
    return _plan(problem, answers_of(backend, device))


@functools.lru_cache(maxsize=4096)
def _plan(problem: DecodeProblem, answers: Answers) -> Plan | None:
    blocks = []
    for query_len, mask in problem.blocks():
        best = plan_block(problem, answers, query_len, mask)
        if best is None:
            return None
        blocks.append(best)
    return _assemble(problem, blocks, answers)


def plan_block(
    problem: DecodeProblem, answers: Answers, query_len: int, mask: Mask
) -> BlockPlan | None:
    """The cheapest plan of one block, or None.

    Candidates come with the fewest virtual requests first; those that cannot rank
    before the best so far are not even asked about.
    """
    best: BlockPlan | None = None
    alone = native(problem, query_len, mask)
    if not answers.refusals(alone.lowered):
        best = price(alone, answers)
    for shape in shapes(problem, query_len, mask, answers.num_q_heads):
        num_virtual, _, length, heads = shape
        if best is not None and best.cost.kv_walks < num_virtual:
            break
        kernel_mask = Mask.CAUSAL if length == 1 else mask
        least = answers.fewest_walks(problem, length, kernel_mask, heads)
        if least is None:
            continue
        if best is not None and not _may_beat(best, num_virtual, least):
            continue
        rewrite = shape.rewrite(problem, query_len, mask)
        if answers.refusals(rewrite.lowered):
            continue
        priced = price(rewrite, answers)
        if best is None or priced.rank < best.rank:
            best = priced
    return best


def _may_beat(best: BlockPlan, num_virtual: int, least_walks: int) -> bool:
    """Whether a rewrite could rank before the best so far, by what needs no asking.

    Each virtual request walks the KV at least `least_walks` times.
    """
    excess = least_walks * num_virtual - best.cost.kv_walks
    if excess == 0:
        rewrite = best.rewrite
        return not rewrite.is_native and rewrite.num_virtual >= num_virtual
    return excess < 0


def nearest_refusals(
    problem: DecodeProblem, backend: Backend, device: DeviceInfo
) -> list[Refusal]:
    """Why the nearest rewrite of each block that has no plan is refused too.

    The nearest is the one with the fewest reasons against it. Asked only where there is
    no plan, so that the refusal shows how far the backend is from serving.
    """
    answers = answers_of(backend, device)
    found: list[Refusal] = []
    for query_len, mask in problem.blocks():
        if plan_block(problem, answers, query_len, mask) is not None:
            continue
        options = [
            (rewrite, answers.refusals(rewrite.lowered))
            for rewrite in rewrites(problem, query_len, mask, _ANY_HEADS)
        ]
        if options:
            rewrite, reasons = min(options, key=lambda option: len(option[1]))
            shape = (
                f"{rewrite.num_virtual} x {rewrite.lowered.max_query_len} token(s) of "
                f"{rewrite.lowered.num_q_heads} heads"
            )
            found.extend(
                replace(
                    reason,
                    message=f"{reason.message}, as a rewrite of the {mask} block of "
                    f"{query_len} to {shape}",
                )
                for reason in reasons
            )
    return found


def price(rewrite: Rewrite, answers: Answers) -> BlockPlan:
    """A rewrite's cost: the kernel's, as often as it is asked, and the copies'."""
    problem = rewrite.lowered
    cost = answers.cost(problem)
    if rewrite.is_native:
        return BlockPlan(rewrite=rewrite, cost=cost)
    copy_bytes, launches = 0, cost.launches
    num_virtual = rewrite.num_virtual
    if num_virtual > 1:
        per_request = _INDEX_BYTES * (problem.table_width + 2) + _ROW_OF_BYTES
        copy_bytes += problem.max_num_reqs * per_request
    if rewrite.pad_rows:
        rows = problem.max_num_reqs * rewrite.kernel_rows
        per_row = ROW_WIDTH * ITEM_BYTES[problem.q_dtype]
        per_row += LATENT_WIDTH * ITEM_BYTES[problem.out_dtype]
        per_row += _LSE_BYTES if problem.needs_lse else 0
        copy_bytes += rows * per_row
        launches += 3 if problem.needs_lse else 2
    return BlockPlan(
        rewrite=rewrite,
        cost=replace(
            cost,
            kv_walks=cost.kv_walks * num_virtual,
            rows=cost.rows * num_virtual,
            launches=launches,
            workspace_bytes=cost.workspace_bytes + copy_bytes,
        ),
        copy_bytes=copy_bytes,
    )
