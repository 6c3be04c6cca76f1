"""The cheapest exact way in which a backend serves a problem."""

from __future__ import annotations

import functools
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from mla_decode.answers import answers_of
from mla_decode.backend import Cost
from mla_decode.lowering.plan import BlockPlan, Plan, Rewrite
from mla_decode.lowering.rewrites import native, rewrite_to, rewrites, shapes
from mla_decode.mask import Mask
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode.workspace import ITEM_BYTES, core_bytes

if TYPE_CHECKING:
    from mla_decode.answers import Answers
    from mla_decode.backend import Backend
    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal

_LEAST = itemgetter(0)
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
        held, seen = 0, set()
        for block in blocks:
            held += block.copy_bytes
            lowered = block.rewrite.lowered
            if lowered not in seen:
                held += block.cost.workspace_bytes - block.copy_bytes
                held += core_bytes(lowered, joins=False)
                seen.add(lowered)
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

    Candidates come with the fewest virtual requests first, and among as many with the
    lowest bound of KV walks first: what cannot rank before the best so far, by walks or
    among as many by memory, is not even asked about.
    """
    best = _as_it_stands(problem, answers, query_len, mask)
    for group, blocks in shapes(problem, query_len, mask, answers.num_q_heads):
        num_virtual = -(-query_len // group)
        if best is not None and not _may_beat(best, num_virtual, 1):
            break
        for least, length, heads in _bounded(blocks, problem, mask, answers):
            if best is not None:
                if not _may_beat(best, num_virtual, least):
                    break
                is_tie = least * num_virtual == best.cost.kv_walks
                if is_tie and best.num_bytes < _least_bytes(
                    problem, query_len, mask, num_virtual, length, heads, answers
                ):
                    continue
            rewrite = rewrite_to(problem, query_len, mask, group, length, heads)
            if answers.refusals(rewrite.lowered):
                continue
            priced = price(rewrite, answers)
            if best is None or priced.rank < best.rank:
                best = priced
    return best


def _as_it_stands(
    problem: DecodeProblem, answers: Answers, query_len: int, mask: Mask
) -> BlockPlan | None:
    """The block's native plan, or None."""
    if answers.fewest_walks(problem, query_len, mask, problem.num_q_heads) is None:
        return None
    alone = native(problem, query_len, mask)
    return None if answers.refusals(alone.lowered) else price(alone, answers)


def _bounded(
    blocks: list[tuple[int, int]], problem: DecodeProblem, mask: Mask, answers: Answers
) -> list[tuple[int, int, int]]:
    """Kernels' blocks that may be served, the fewest KV walks of one request first."""
    found = []
    for length, heads in blocks:
        seen = Mask.CAUSAL if length == 1 else mask
        least = answers.fewest_walks(problem, length, seen, heads)
        if least is not None:
            found.append((least, length, heads))
    found.sort(key=_LEAST)
    return found


def _least_bytes(
    problem: DecodeProblem,
    query_len: int,
    mask: Mask,
    num_virtual: int,
    length: int,
    heads: int,
    answers: Answers,
) -> int:
    """A lower bound of a rewrite's memory: its own copies, and what the backend knows."""
    rows = length * heads
    num_pads = num_virtual * rows - query_len * problem.num_q_heads
    num_reqs = num_virtual * problem.max_num_reqs
    copies = _copy_bytes(problem, num_reqs, num_virtual, rows if num_pads else 0)
    seen = Mask.CAUSAL if length == 1 else mask
    return copies + answers.least_bytes(problem, length, seen, heads, num_reqs)


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
    launches, rows = cost.launches, 0
    num_virtual = rewrite.num_virtual
    if rewrite.pad_rows:
        rows = rewrite.kernel_rows
        launches += 3 if problem.needs_lse else 2
    copy_bytes = _copy_bytes(problem, problem.max_num_reqs, num_virtual, rows)
    return BlockPlan(
        rewrite=rewrite,
        cost=Cost(
            kv_walks=cost.kv_walks * num_virtual,
            rows=cost.rows * num_virtual,
            launches=launches,
            workspace_bytes=cost.workspace_bytes + copy_bytes,
            index_entries=cost.index_entries,
            call_bytes=cost.call_bytes,
        ),
        copy_bytes=copy_bytes,
    )


def _copy_bytes(
    problem: DecodeProblem, num_reqs: int, num_virtual: int, rows: int
) -> int:
    """What a rewrite's own buffers take.

    Args:
        problem: Gives dtypes, page size and whether the LSE is asked for.
        num_reqs: Virtual requests of the largest batch.
        num_virtual: Of them, those of one request: more than one, and tables repeat.
        rows: Padded rows of a virtual request; 0 where no row is copied.
    """
    held = 0
    if num_virtual > 1:
        held += _INDEX_BYTES * (problem.table_width + 2) + _ROW_OF_BYTES
    if rows:
        per_row = ROW_WIDTH * ITEM_BYTES[problem.q_dtype]
        per_row += LATENT_WIDTH * ITEM_BYTES[problem.out_dtype]
        per_row += _LSE_BYTES if problem.needs_lse else 0
        held += rows * per_row
    return num_reqs * held
