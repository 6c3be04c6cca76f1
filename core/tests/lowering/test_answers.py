"""A backend's own answers: read once a plan, asked by shape first, and never stale."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mla_decode import Backend, DecodeProblem, DeviceInfo, Mask
from mla_decode.answers import answers_of
from mla_decode.lowering import native_plan, plan_exact
from mla_decode.lowering.planner import price
from mla_decode.lowering.rewrites import native, rewrites

CPU = DeviceInfo.assume("cpu")
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Answers with a bound of walks by shape, and a count of what was asked beyond."""

    backend: Any
    bounds: Any
    unsure_bytes: int = 0
    asked: list = dataclasses.field(default_factory=list, compare=False)

    def __hash__(self):
        return id(self.bounds)

    num_q_heads = frozenset(WIDTHS)

    def refusals(self, problem):
        self.asked.append(problem)
        return self.backend.refusals(problem, CPU)

    def cost(self, problem):
        return self.backend.cost(problem, CPU)

    def fewest_walks(self, problem, query_len, mask, num_q_heads):
        del problem
        return self.bounds.get((query_len, mask, num_q_heads))

    def least_bytes(self, problem, query_len, mask, num_q_heads, num_reqs):
        """All that the backend's cost says, less what a rewrite may share of it."""
        block = dataclasses.replace(
            problem,
            num_q_heads=num_q_heads,
            query_lens={query_len},
            masks={mask},
            max_num_reqs=num_reqs,
        )
        cost = self.backend.cost(block, CPU)
        return max(0, cost.workspace_bytes + cost.call_bytes - self.unsure_bytes)


def problem_of(heads, query_lens, masks):
    return DecodeProblem(
        num_q_heads=heads,
        q_dtype="fp32",
        kv_dtype="fp32",
        out_dtype="fp32",
        page_size=16,
        query_lens=query_lens,
        masks=masks,
        max_num_reqs=4,
        max_model_len=128,
    )


@pytest.fixture
def bounded(narrow):
    """A backend with answers of its own: its kernels' walks are their bounds."""

    def make(walks):
        backend = narrow(walks)
        backend.answers = lambda _: backend.now
        backend.now = Bounded(backend, walks)
        return backend

    return make


kernels = st.dictionaries(
    st.tuples(
        st.integers(1, 8), st.sampled_from(list(Mask)), st.sampled_from(WIDTHS)
    ).map(lambda key: (key[0], Mask.CAUSAL if key[0] == 1 else key[1], key[2])),
    st.tuples(st.integers(1, 8), st.integers(0, 7)),
    min_size=1,
    max_size=12,
)


@given(
    table=kernels,
    heads=st.sampled_from((1, 2, 3, 4, 8, 16)),
    query_len=st.integers(1, 6),
    mask=st.sampled_from(list(Mask)),
    unsure_bytes=st.sampled_from((0, 64, 4096, 1 << 30)),
)
def test_a_sound_bound_changes_no_plan(
    narrow, table, heads, query_len, mask, unsure_bytes
):
    walks = {key: found for key, (found, _) in table.items()}
    backend = narrow(walks)
    bounds = {key: max(1, found - slack) for key, (found, slack) in table.items()}
    backend.now = Bounded(backend, bounds, unsure_bytes)
    backend.answers = lambda _: backend.now
    problem = problem_of(heads, {query_len}, {mask})
    plain = narrow(walks)
    everything = [
        native(problem, query_len, mask),
        *rewrites(problem, query_len, mask, range(1, 1025)),
    ]
    legal = [
        price(rewrite, answers_of(plain, CPU)).rank
        for rewrite in everything
        if not plain.refusals(rewrite.lowered, CPU)
    ]
    plan = plan_exact(problem, backend, CPU)
    assert (plan is None) == (not legal)
    if plan is not None:
        assert plan.blocks[0].rank == min(legal)


def test_shapes_that_the_bound_rules_out_are_not_asked_about(bounded):
    walks = {(1, Mask.CAUSAL, width): width // 16 for width in (16, 32, 64, 128)}
    backend = bounded(walks)
    plan = plan_exact(problem_of(16, {8}, {Mask.NON_CAUSAL}), backend, CPU)
    assert (plan.kind, plan.cost.kv_walks) == ("fold", 8)
    asked = [(p.max_query_len, p.num_q_heads) for p in backend.now.asked]
    assert asked == [(1, 128)]  # the fold that is taken


def test_of_as_many_virtual_requests_the_lowest_bound_is_asked_first(bounded):
    walks = {
        (8, Mask.NON_CAUSAL, 16): 9,
        (1, Mask.CAUSAL, 128): 7,
        (8, Mask.NON_CAUSAL, 64): 3,
        (8, Mask.NON_CAUSAL, 96): 5,
    }
    backend = bounded(walks)
    plan = plan_exact(problem_of(16, {8}, {Mask.NON_CAUSAL}), backend, CPU)
    assert (plan.kind, plan.cost.kv_walks) == ("pad", 3)
    asked = [(p.max_query_len, p.num_q_heads) for p in backend.now.asked]
    assert asked == [(8, 16), (8, 64)]  # the block itself, and the one that is taken


def test_of_as_many_walks_only_what_may_take_less_memory_is_asked_about(bounded):
    widths = {(1, Mask.CAUSAL, width): 4 for width in (96, 112, 128)}
    backend = bounded({**widths, (5, Mask.NON_CAUSAL, 16): 4})
    plan = plan_exact(problem_of(16, {4}, {Mask.NON_CAUSAL}), backend, CPU)
    assert plan.blocks[0].rewrite.lowered.query_lens == {5}
    asked = [(p.max_query_len, p.num_q_heads) for p in backend.now.asked]
    assert asked == [(1, 96), (5, 16)]  # of 96 rows, and of 80


def test_a_plan_is_made_again_once_the_answers_changed(narrow, bounded):
    walks = {(1, Mask.CAUSAL, 64): 1}
    backend = bounded(walks)
    problem = problem_of(16, {4}, {Mask.NON_CAUSAL})
    first = plan_exact(problem, backend, CPU)
    assert plan_exact(problem, backend, CPU) is first
    more = {**walks, (4, Mask.NON_CAUSAL, 16): 1}
    backend.now = Bounded(narrow(more), more)
    assert plan_exact(problem, backend, CPU).kind == "native"
    assert native_plan(problem, backend, CPU).kind == "native"


def test_the_answers_of_a_plain_backend_are_the_backends(narrow):
    backend = narrow({(2, Mask.CAUSAL, 16): 3})
    assert isinstance(backend, Backend)
    answers = answers_of(backend, CPU)
    problem = problem_of(16, {2}, {Mask.CAUSAL})
    assert answers == answers_of(backend, CPU)
    assert answers.num_q_heads == frozenset({16})
    assert answers.refusals(problem) == backend.refusals(problem, CPU) == []
    assert answers.cost(problem) == backend.cost(problem, CPU)
    assert answers.fewest_walks(problem, 2, Mask.CAUSAL, 16) == 1
    assert answers.least_bytes(problem, 2, Mask.CAUSAL, 16, 4) == 0
    assert answers_of(backend, DeviceInfo.assume("sm_90")).num_q_heads == frozenset()


def test_a_rewrites_problem_is_equal_to_one_that_was_validated():
    problem = dataclasses.replace(
        problem_of(16, {2, 6}, {Mask.NON_CAUSAL}), needs_lse=True, graphs=True
    )
    for rewrite in rewrites(problem, 6, Mask.NON_CAUSAL, range(1, 1025)):
        again = dataclasses.replace(rewrite.lowered)
        assert again == rewrite.lowered
        assert hash(again) == hash(rewrite.lowered)
        assert rewrite.lowered.num_q_heads * rewrite.num_virtual >= 16
