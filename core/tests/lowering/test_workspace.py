"""Device memory: what is said before equals what is held after, and budgets hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_decode import (
    ArgumentError,
    BackendRefused,
    Candidate,
    DecodeProblem,
    DeviceInfo,
    Mask,
    MLADecoder,
    select,
    survey,
)
from mla_decode.backend import Cost
from mla_decode.lowering import native_plan, plan_exact
from mla_decode.lowering.backend import apply_plan
from mla_decode.reference.backend import ReferenceBackend
from mla_decode.workspace import Workspace, core_bytes, held_bytes, workspace_of

CPU = DeviceInfo.assume("cpu")
problems = st.builds(
    DecodeProblem,
    num_q_heads=st.integers(1, 8),
    query_lens=st.sets(st.integers(1, 4), min_size=1),
    masks=st.sets(st.sampled_from(Mask), min_size=1),
    needs_lse=st.booleans(),
    page_size=st.sampled_from([16, 64]),
    max_num_reqs=st.integers(1, 5),
    max_model_len=st.integers(4, 300),
)


@given(problem=problems)
def test_the_reference_allocates_nothing_of_its_own(problem):
    backend = ReferenceBackend()
    assert backend.cost(problem, CPU).workspace_bytes == 0
    builder = backend.builder_cls(problem, CPU)
    assert held_bytes(builder) == core_bytes(problem, joins=False)
    builder.join_query(
        torch.zeros(1, problem.num_q_heads, 512),
        torch.zeros(1, problem.num_q_heads, 64),
    )
    joined = core_bytes(problem, joins=True) - core_bytes(problem, joins=False)
    float32 = 2  # times what the problem's bf16 would take
    assert held_bytes(builder) == core_bytes(problem, joins=False) + float32 * joined


@given(problem=problems)
def test_a_lowering_holds_what_its_plan_says(narrow, problem):
    heads = problem.num_q_heads
    backend = narrow({(1, Mask.CAUSAL, width): 1 for width in (heads, 16, 32)})
    plan = plan_exact(problem, backend, CPU)
    lowered = apply_plan(backend, plan)
    builder = lowered.builder_cls(problem, CPU)
    inner = sum(
        backend.cost(found, CPU).workspace_bytes
        for found in {block.rewrite.lowered for block in plan.blocks}
    )
    held = held_bytes(builder) - core_bytes(problem, joins=False)
    if plan.kind == "native":
        assert held == 0
    else:
        assert held == plan.cost.workspace_bytes - inner
    assert lowered.workspace_bytes(problem, CPU) == plan.cost.workspace_bytes


class Thirsty:
    """Mixed into a backend: wants so many bytes, in its builder and in a call."""

    wants = (1000, 24)

    def cost(self, problem, device):
        del problem, device
        held, call = self.wants
        return Cost(
            kv_walks=1, rows=1, launches=1, workspace_bytes=held, call_bytes=call
        )


@pytest.fixture
def thirsty(plain_backend_cls):
    return type("Thirsty", (Thirsty, plain_backend_cls), {"name": "triton_mla"})()


def test_a_budget_is_held_against_all_parts_to_the_byte(thirsty, make_step, cpu):
    problem = make_step().problem
    candidates = {"triton_mla": Candidate(name="triton_mla", backend=thirsty)}
    core = core_bytes(problem, joins=True)
    need = Workspace(backend=1000, core=core, call=24)
    options = {"candidates": candidates, "device": cpu}
    decoder = MLADecoder(
        problem, "triton_mla", workspace_limit_bytes=need.total, **options
    )
    assert decoder.selection.workspace == need
    decoder.plan(make_step().common)
    assert decoder.report().workspace_bytes == need.total
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(
            problem, "triton_mla", workspace_limit_bytes=need.total - 1, **options
        )
    (reason,) = caught.value.refusals
    assert reason.code == "workspace"
    assert str(need.total) in reason.got
    assert str(need.total - 1) in reason.allowed


class Unbuilt(Thirsty):
    """Mixed into a backend: a builder of it, which alone allocates, is never reached."""

    @property
    def builder_cls(self):
        raise LookupError("a builder was asked for")


def test_what_passes_the_budget_is_refused_before_a_byte_is_allocated(
    plain_backend_cls, make_step, cpu
):
    problem = make_step().problem
    backend = type("Unbuilt", (Unbuilt, plain_backend_cls), {})()
    options = {
        "device": cpu,
        "candidates": {"plain": Candidate(name="plain", backend=backend)},
    }
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(problem, "plain", workspace_limit_bytes=1, **options)
    assert caught.value.codes == {"workspace"}
    with pytest.raises(LookupError, match="a builder was asked for"):
        MLADecoder(problem, "plain", **options)


def test_auto_goes_on_to_who_fits_the_budget(thirsty, plain_backend, make_step, caplog):
    problem = make_step().problem
    known = {
        "triton_mla": Candidate(name="triton_mla", backend=thirsty),
        "plain": Candidate(name="plain", backend=plain_backend),
    }
    device = DeviceInfo.assume("sm_90")
    limit = core_bytes(problem, joins=True) + 100
    with caplog.at_level("INFO", logger="mla_decode"):
        chosen = select(problem, device, candidates=known, workspace_limit_bytes=limit)
    assert chosen.backend is plain_backend
    assert [str(r.code) for r in chosen.refused["triton_mla"]] == ["workspace"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_native_plan_is_tried_where_the_exact_one_passes_the_budget(narrow):
    problem = DecodeProblem(
        num_q_heads=4, query_lens={4}, masks={Mask.NON_CAUSAL}, max_num_reqs=4
    )
    walks = {(4, Mask.NON_CAUSAL, 4): 9, (1, Mask.CAUSAL, 32): 1}
    backend = narrow(walks)
    known = {"narrow": Candidate(name="narrow", backend=backend)}
    exact = plan_exact(problem, backend, CPU)
    native = native_plan(problem, backend, CPU)
    assert exact.kind == "pad"
    small, large = (workspace_of(backend, plan).total for plan in (native, exact))
    assert small < large

    def kinds(limit):
        found = survey(
            problem,
            CPU,
            "narrow",
            "exact",
            candidates=known,
            workspace_limit_bytes=limit,
        )
        return found.selection and found.selection.plan.kind

    assert [kinds(n) for n in (None, large, small, 0)] == ["pad", "pad", "native", None]


@pytest.mark.parametrize("limit", [-1, 1.5, "1 GiB", True])
def test_a_limit_is_bytes(make_step, limit):
    with pytest.raises(ArgumentError, match="workspace_limit_bytes"):
        MLADecoder(make_step().problem, device="cpu", workspace_limit_bytes=limit)


def test_a_workspace_prints_as_plain_data():
    found = Workspace(backend=1, core=2, call=3)
    assert found.as_dict() == {"total": 6, "backend": 1, "core": 2, "call": 3}


def test_only_what_lies_on_the_builders_device_is_counted_once(plain_builder, cpu):
    builder = plain_builder(DecodeProblem(num_q_heads=1, max_num_reqs=2), cpu)
    before = held_bytes(builder)
    room = torch.zeros(8)
    builder.extra = [room, {"view": room[2:]}, {torch.float32}, torch.empty(0)]
    builder.elsewhere = torch.empty(4, device="meta")
    builder.foreign = torch.Generator()
    assert held_bytes(builder) == before + 32


def test_memory_that_the_engine_lent_is_not_the_builders(plain_builder, cpu):
    builder = plain_builder(DecodeProblem(num_q_heads=1, max_num_reqs=2), cpu)
    before = held_bytes(builder)
    cache = torch.zeros(8)
    builder.view = cache[2:]
    assert held_bytes(builder, borrowed=[cache]) == before
    assert held_bytes(builder, borrowed=[torch.zeros(1)]) == before + 32
