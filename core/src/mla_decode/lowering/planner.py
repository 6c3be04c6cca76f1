"""The cheapest exact way in which a backend serves a problem."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from mla_decode.lowering.plan import BlockPlan, Plan, Rewrite
from mla_decode.lowering.rewrites import native, rewrites
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH

if TYPE_CHECKING:
    from mla_decode.backend import Backend
    from mla_decode.device import DeviceInfo
    from mla_decode.mask import Mask
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal

_ANY_HEADS = range(1, 1 << 20)
_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
_LSE_BYTES = 4
_INDEX_BYTES = 4


def native_plan(problem: DecodeProblem, backend: Backend, device: DeviceInfo) -> Plan:
    """The plan of a backend that accepts the problem as it stands."""
    return Plan(
        problem=problem,
        blocks=tuple(
            price(native(problem, query_len, mask), backend, device)
            for query_len, mask in problem.blocks()
        ),
    )


@functools.lru_cache(maxsize=4096)
def plan_exact(
    problem: DecodeProblem, backend: Backend, device: DeviceInfo
) -> Plan | None:
    """The cheapest exact plan of every block, or None where a block has none.

    Blocks are planned apart: a causal verify may stay native beside a folded draft.
    Pure in its arguments, and cached by them.
    """
    blocks = []
    for query_len, mask in problem.blocks():
        best = plan_block(problem, backend, device, query_len, mask)
        if best is None:
            return None
        blocks.append(best)
    return Plan(problem=problem, blocks=tuple(blocks))


def plan_block(
    problem: DecodeProblem,
    backend: Backend,
    device: DeviceInfo,
    query_len: int,
    mask: Mask,
) -> BlockPlan | None:
    """The cheapest plan of one block, or None.

    Candidates come with the fewest virtual requests first; those that cannot rank
    before the best so far are not even asked about.
    """
    best: BlockPlan | None = None
    alone = native(problem, query_len, mask)
    if not backend.refusals(alone.lowered, device):
        best = price(alone, backend, device)
    row = backend.capability.row(device.arch)
    num_q_heads = frozenset[int]() if row is None else row.num_q_heads
    for rewrite in rewrites(problem, query_len, mask, num_q_heads):
        if best is not None and best.cost.kv_walks < rewrite.num_virtual:
            break
        if best is not None and not _may_beat(best, rewrite):
            continue
        if backend.refusals(rewrite.lowered, device):
            continue
        priced = price(rewrite, backend, device)
        if best is None or priced.rank < best.rank:
            best = priced
    return best


def _may_beat(best: BlockPlan, rewrite: Rewrite) -> bool:
    """Whether a rewrite could rank before the best so far, by what needs no asking.

    Each virtual request walks the KV at least once; of rewrites with as many virtual
    requests and walks, fewer kernel rows cost less.
    """
    walks, virtual = best.cost.kv_walks, rewrite.num_virtual
    if best.rewrite.is_native or best.rewrite.num_virtual < virtual:
        return virtual < walks
    return virtual < walks or rewrite.kernel_rows < best.rewrite.kernel_rows


def nearest_refusals(
    problem: DecodeProblem, backend: Backend, device: DeviceInfo
) -> list[Refusal]:
    """Why the nearest rewrite of each block that has no plan is refused too.

    The nearest is the one with the fewest reasons against it. Asked only where there is
    no plan, so that the refusal shows how far the backend is from serving.
    """
    found: list[Refusal] = []
    for query_len, mask in problem.blocks():
        if plan_block(problem, backend, device, query_len, mask) is not None:
            continue
        options = [
            (rewrite, backend.refusals(rewrite.lowered, device))
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


def price(rewrite: Rewrite, backend: Backend, device: DeviceInfo) -> BlockPlan:
    """A rewrite's cost: the kernel's, as often as it is asked, and the copies'."""
    problem = rewrite.lowered
    cost = backend.cost(problem, device)
    if rewrite.is_native:
        return BlockPlan(rewrite=rewrite, cost=cost)
    copies = 0
    workspace = cost.workspace_bytes
    launches = cost.launches
    if rewrite.num_virtual > 1:
        workspace += _INDEX_BYTES * problem.max_num_reqs * (problem.table_width + 2)
    if rewrite.pad_rows:
        copies = problem.max_num_reqs * problem.num_q_heads * problem.max_query_len
        per_row = ROW_WIDTH * _BYTES[problem.q_dtype]
        per_row += LATENT_WIDTH * _BYTES[problem.out_dtype]
        per_row += _LSE_BYTES if problem.needs_lse else 0
        workspace += copies * per_row
        launches += 3 if problem.needs_lse else 2
    return BlockPlan(
        rewrite=rewrite,
        cost=replace(
            cost,
            kv_walks=cost.kv_walks * rewrite.num_virtual,
            rows=cost.rows * rewrite.num_virtual,
            launches=launches,
            workspace_bytes=workspace,
        ),
    )
