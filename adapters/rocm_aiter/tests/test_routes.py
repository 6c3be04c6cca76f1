"""The gate of the schedule, and the ways that only causal blocks may take."""

import pytest
from aiter_steps import device_of, problem_of, serve

from mla_decode import Dcp, Mask, RefusalCode
from mla_decode_rocm_aiter import backend
from mla_decode_rocm_aiter.facts import packaged_facts
from mla_decode_rocm_aiter.limits import LeavingVariables
from mla_decode_rocm_aiter.routes import (
    ROUTES,
    Block,
    RouteKind,
    choose_route,
    wants_schedule,
)

CAUSAL_ONLY = {
    RouteKind.UNSCHEDULED,
    RouteKind.GLUON,
    RouteKind.DCP_SEGMENTED,
    RouteKind.DCP_ROUND_ROBIN,
}


def route_of(problem, arch="gfx950", release="0.1.20.post1"):
    ((q, mask),) = problem.blocks()
    facts = packaged_facts(arch, release)
    return choose_route(facts, Block.of(problem, q, mask), LeavingVariables())


@pytest.mark.parametrize(
    ("heads", "q", "dtypes", "wanted"),
    [
        (16, 8, "bf16 bf16", True),
        (12, 4, "bf16 bf16", True),
        (12, 5, "bf16 bf16", False),
        (12, 5, "fp8 fp8", True),
        (12, 5, "bf16 fp8", True),
    ],
)
def test_the_causal_gate(heads, q, dtypes, wanted):
    problem = problem_of(heads, q, dtypes=dtypes)
    assert wants_schedule(Block.of(problem, q, Mask.CAUSAL)) is wanted
    assert wants_schedule(Block.of(problem, q, Mask.NON_CAUSAL))


@pytest.mark.parametrize("q", [2, 5, 8, 16])
@pytest.mark.parametrize("heads", [8, 12, 16])
def test_a_non_causal_block_always_keeps_its_schedule(heads, q):
    builder, metadata, _ = serve(
        problem_of(heads, q, causal=False), device_of(), [q + 3, 40], causal=False
    )
    assert metadata.has_persistent_metadata
    assert builder.library.machine.launches[0].masks is False


def test_a_causal_block_of_few_heads_and_8_tokens_runs_without_one():
    _, metadata, _ = serve(problem_of(12, 8), device_of(), [11, 40])
    assert metadata.schedule is None
    assert metadata.num_kv_splits >= 2


def test_where_the_gates_way_has_no_answer_the_other_is_taken():
    """Six tokens would be equal rows without a schedule; gfx942 has no schedule for 8."""
    assert route_of(problem_of(12, 6)).kind is RouteKind.SCHEDULED
    _, metadata, _ = serve(problem_of(12, 6), device_of(), [11, 40])
    assert metadata.has_persistent_metadata
    assert route_of(problem_of(16, 8), "gfx942").kind is RouteKind.UNSCHEDULED
    serve(problem_of(16, 8), device_of("gfx942"), [11, 40])


def test_where_neither_way_has_an_answer_the_block_is_refused():
    reasons = backend.refusals(problem_of(16, 6), device_of("gfx942"))
    assert {reason.code for reason in reasons} == {RefusalCode.QUERY_LEN}


def test_a_non_causal_block_reaches_no_way_that_masks():
    assert CAUSAL_ONLY.isdisjoint(ROUTES[Mask.NON_CAUSAL])
    assert set(ROUTES[Mask.CAUSAL]) > CAUSAL_ONLY
    for heads in range(1, 129):
        for q in range(2, 17):
            route = route_of(problem_of(heads, q, causal=False))
            assert isinstance(route, list) or route.kind is RouteKind.SCHEDULED


def test_a_non_causal_block_under_dcp_takes_the_plain_kernel_with_lse():
    problem = problem_of(16, 4, causal=False, dcp=Dcp(world=2))
    assert backend.refusals(problem, device_of()) == []
    route = route_of(problem)
    assert route.kind is RouteKind.SCHEDULED
    assert route.key.lse


@pytest.mark.parametrize(
    ("arch", "dtypes"),
    [("gfx950", "bf16 fp8"), ("gfx942", "bf16 fp8"), ("gfx942", "bf16 bf16")],
)
def test_elsewhere_it_is_refused_for_its_lse(arch, dtypes):
    problem = problem_of(16, 4, causal=False, dtypes=dtypes, dcp=Dcp(world=2))
    reasons = backend.refusals(problem, device_of(arch))
    assert RefusalCode.LSE in {reason.code for reason in reasons}


def test_a_causal_block_under_dcp_never_meets_a_local_mask():
    problem = problem_of(16, 4, dcp=Dcp(world=2))
    codes = {reason.code for reason in backend.refusals(problem, device_of())}
    assert codes == {RefusalCode.DCP}


def test_the_way_with_fewer_walks_is_taken():
    """gfx942 bf16, 128 heads: eight groups with a schedule, one walk without."""
    route = route_of(problem_of(128, 1), "gfx942")
    assert (route.kind, route.walks) == (RouteKind.UNSCHEDULED, 1)
    serve(problem_of(128, 1, needs_lse=True), device_of("gfx942"), [70, 5])


@pytest.mark.parametrize(
    ("arch", "heads", "q", "dtypes", "causal", "walks"),
    [
        ("gfx942", 96, 1, "fp8 fp8", True, 6),
        ("gfx942", 128, 1, "fp8 fp8", True, 1),
        ("gfx942", 96, 1, "bf16 bf16", True, 6),
        ("gfx950", 48, 8, "bf16 bf16", False, 8),
        ("gfx950", 96, 1, "bf16 bf16", False, 1),
        ("gfx950", 128, 4, "fp8 fp8", False, 4),
        ("gfx950", 16, 8, "fp8 fp8", False, 1),
        ("gfx950", 80, 9, "fp8 fp8", False, 10),
    ],
)
def test_cost_reports_the_walks_of_the_key(arch, heads, q, dtypes, causal, walks):
    problem = problem_of(heads, q, causal=causal, dtypes=dtypes)
    assert backend.cost(problem, device_of(arch)).kv_walks == walks


@pytest.mark.parametrize(
    ("heads", "q", "dtypes"),
    [
        (48, 8, "bf16 bf16"),
        (96, 4, "fp8 fp8"),
        (16, 16, "bf16 bf16"),
        (128, 3, "fp8 fp8"),
    ],
)
def test_walks_are_the_work_items_of_a_request_that_is_not_split(heads, q, dtypes):
    problem = problem_of(heads, q, causal=False, dtypes=dtypes, max_num_reqs=1)
    builder, metadata, _ = serve(problem, device_of(), [q + 1], causal=False)
    works = int(metadata.schedule.work_indptr[-1])
    assert works == builder.routes[q, False].walks


def test_native_coverage_of_the_common_shapes():
    """9 head counts, 15 lengths, 3 dtype pairs, non-causal, without LSE."""
    served = {}
    for release in ("0.1.20.post1", "0.1.16.post6"):
        for arch in ("gfx942", "gfx950"):
            served[release, arch] = sum(
                not backend.refusals(
                    problem_of(heads, q, causal=False, dtypes=dtypes),
                    device_of(arch, release),
                )
                for heads in (8, 12, 16, 24, 32, 48, 64, 96, 128)
                for q in range(2, 17)
                for dtypes in ("bf16 bf16", "fp8 fp8", "bf16 fp8")
            )
    assert served == {
        ("0.1.20.post1", "gfx942"): 0,
        ("0.1.20.post1", "gfx950"): 265,
        ("0.1.16.post6", "gfx942"): 0,
        ("0.1.16.post6", "gfx950"): 0,
    }
