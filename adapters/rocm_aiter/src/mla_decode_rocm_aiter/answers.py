"""What one AITER says of any problem on one arch, its facts and variables read once."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from mla_decode import Mask, Refusal
from mla_decode.backend import Cost
from mla_decode_rocm_aiter.capability import CAPABILITY
from mla_decode_rocm_aiter.facts import Facts, find_facts
from mla_decode_rocm_aiter.gates import arch_has_non_causal
from mla_decode_rocm_aiter.library import outdated, refused
from mla_decode_rocm_aiter.limits import LeavingVariables
from mla_decode_rocm_aiter.planning import (
    declared_refusals,
    non_causal_gates,
    plan_block,
)
from mla_decode_rocm_aiter.routes import Block, Route
from mla_decode_rocm_aiter.workspace import (
    index_entries,
    partial_bytes,
    workspace_of,
)

if TYPE_CHECKING:
    from mla_decode import DecodeProblem, DeviceInfo, IntSet

Routes = dict[tuple[int, bool], Route]


class AiterAnswers:
    """The answers of one AITER on one arch; see `mla_decode.answers`.

    Args:
        arch: The device's.
        facts: What is known of its AITER, or the reason why nothing is.
        variables: The environment at this moment.
    """

    def __init__(
        self, arch: str, facts: Facts | Refusal | None, variables: LeavingVariables
    ) -> None:
        self.arch = arch
        self.facts = facts
        self.variables = variables
        row = CAPABILITY.row(arch)
        self.num_q_heads: IntSet = frozenset() if row is None else row.num_q_heads
        self._blocks: dict[Block, Route | list[Refusal]] = {}
        self._last: tuple[DecodeProblem, list[Refusal], Routes] | None = None

    def refusals(self, problem: DecodeProblem) -> list[Refusal]:
        """Every reason: the declared row's, the installed AITER's, each block's."""
        return list(self._plan(problem)[0])

    def routes(self, problem: DecodeProblem) -> Routes:
        """The way of every block of a problem, by block length and causal.

        Raises:
            OutdatedLibraryError: Only a newer AITER has a mask on this arch.
            BackendRefused: With every reason.
        """
        reasons, routes = self._plan(problem)
        facts = self.facts
        if isinstance(facts, Facts) and not facts.has_causal:
            needs_mask = problem.needs_non_causal and arch_has_non_causal(self.arch)
            if needs_mask:
                raise outdated(facts.release)
        if reasons:
            raise refused(*reasons)
        return routes

    def cost(self, problem: DecodeProblem) -> Cost:
        """What the problem's dearest block costs, by the key that it resolves to.

        Raises:
            BackendRefused: The problem is not served here.
        """
        routes = self.routes(problem)
        workspace = workspace_of(problem, self.arch, routes)
        walks = rows = launches = 0
        for (q, _), route in routes.items():
            walks = max(walks, route.walks)
            rows = max(rows, q * route.heads)
            launches = max(launches, _launches(problem, q, route))
        return Cost(
            kv_walks=walks,
            rows=rows,
            launches=launches,
            workspace_bytes=workspace.kept,
            index_entries=index_entries(problem),
            call_bytes=workspace.passing,
        )

    def fewest_walks(
        self, problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: int
    ) -> int | None:
        """The walks of the route, which batch sizes do not change."""
        found = self._route(problem, query_len, mask, num_q_heads)
        return None if found is None else found.walks

    def least_bytes(
        self,
        problem: DecodeProblem,
        query_len: int,
        mask: Mask,
        num_q_heads: int,
        num_reqs: int,
    ) -> int:
        """The index list, and AITER's partial outputs: most of what a route takes."""
        found = self._route(problem, query_len, mask, num_q_heads)
        if found is None:
            return 0
        dtypes = (problem.q_dtype, problem.kv_dtype)
        return 4 * num_reqs * problem.max_model_len + partial_bytes(
            found, query_len, dtypes, self.arch, num_reqs
        )

    def _route(
        self, problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: int
    ) -> Route | None:
        dtypes = problem.q_dtype, problem.kv_dtype
        block = Block(num_q_heads, *dtypes, problem.needs_lse, query_len, mask)
        found = self._blocks.get(block) or self.block(block)
        return found if isinstance(found, Route) else None

    def block(self, block: Block) -> Route | list[Refusal]:
        """A block's way, or its reasons beside those that the declared row gives."""
        found = self._blocks.get(block)
        if found is None:
            facts = self.facts
            if not isinstance(facts, Facts):
                return []
            found = plan_block(facts, block, self.variables)
            if facts.profile is not None:  # else a probe's record, which may grow
                self._blocks[block] = found
        return found

    def _plan(self, problem: DecodeProblem) -> tuple[list[Refusal], Routes]:
        """Every reason once, in order, and the routes of the blocks that have one.

        The last problem's are kept: a planner asks for refusals, then for the cost.
        """
        last = self._last
        if last is not None and last[0] is problem:
            return last[1], last[2]
        reasons = declared_refusals(problem, self.arch)
        if isinstance(self.facts, Refusal):
            reasons.append(self.facts)
        elif self.facts is not None:
            reasons.extend(non_causal_gates(self.facts, problem))
        routes: Routes = {}
        for q, mask in problem.blocks():
            found = self.block(Block.of(problem, q, mask))
            if isinstance(found, Route):
                routes[q, mask is Mask.CAUSAL] = found
            else:
                reasons.extend(found)
        kept = list(dict.fromkeys(reasons))
        if not (isinstance(self.facts, Facts) and self.facts.profile is None):
            self._last = problem, kept, routes
        return kept, routes


def answers_for(device: DeviceInfo) -> AiterAnswers:
    """The answers of a device's AITER as things stand now.

    The same object as long as its facts and the environment stay what they are.
    """
    if CAPABILITY.row(device.arch) is None:
        return _without_facts(device.arch, None)
    facts = find_facts(device)
    if isinstance(facts, Refusal):
        return _without_facts(device.arch, facts)
    variables = LeavingVariables.read()
    found = facts.answers.get(variables)
    if found is None:
        found = AiterAnswers(device.arch, facts, variables)
        facts.answers[variables] = found
    return found


@lru_cache(maxsize=64)
def _without_facts(arch: str, reason: Refusal | None) -> AiterAnswers:
    return AiterAnswers(arch, reason, LeavingVariables())


def _launches(problem: DecodeProblem, q: int, route: Route) -> int:
    """Device kernels of one forward: AITER's two, padding, folding, and the fix-ups."""
    launches = 2 + 1 + 2 * problem.needs_lse
    if route.heads != problem.num_q_heads:
        launches += 2
    elif route.keeps_schedule and route.key.fold > 1 and q > 1:
        launches += 4
    return launches
