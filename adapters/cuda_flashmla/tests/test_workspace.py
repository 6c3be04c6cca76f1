"""What is said of memory, splits and bits, against what a builder and a call do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_decode import BackendRefused, DecodeProblem, DeviceInfo, Feature, MLADecoder
from mla_decode.workspace import core_bytes, held_bytes
from mla_decode_cuda_flashmla import backend

RELEASES = (
    {"flash-mla": "2026.4"},
    {"flash-mla": "2025.4"},
    {"sgl-flash-mla": "1.0.0"},
)

problems = st.builds(
    DecodeProblem,
    num_q_heads=st.integers(1, 40),
    query_lens=st.sets(st.integers(1, 4), min_size=1),
    needs_lse=st.booleans(),
    graphs=st.booleans(),
    max_num_reqs=st.integers(1, 9),
    max_model_len=st.integers(4, 2000),
)


@given(problem=problems, release=st.sampled_from(RELEASES))
def test_a_builder_holds_what_the_cost_says(problem, release):
    device = DeviceInfo.assume("sm_90", libraries=release)
    builder = backend.builder_cls(problem, device)
    held = held_bytes(builder) - core_bytes(problem, joins=False)
    assert held == backend.cost(problem, device).workspace_bytes


@given(problem=problems, more=st.integers(1, 9))
def test_a_larger_batch_takes_no_less(problem, more):
    device = DeviceInfo.assume("sm_90")
    grown = type(problem)(
        **{
            name: getattr(problem, name)
            for name in type(problem).__dataclass_fields__
            if name != "max_num_reqs"
        },
        max_num_reqs=problem.max_num_reqs + more,
    )
    small, large = (backend.cost(p, device) for p in (problem, grown))
    assert small.workspace_bytes < large.workspace_bytes
    assert small.call_bytes < large.call_bytes


def test_split_results_of_a_call_are_in_the_budget(kit):
    problem = kit.problem(max_num_reqs=64)
    device = kit.assumed()
    split_results = 4 * (64 + 132) * 16 * 513
    need = MLADecoder(problem, "cuda_flashmla", device=device).selection.workspace
    assert split_results < need.call < 1.02 * split_results
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(
            problem,
            "cuda_flashmla",
            device=device,
            workspace_limit_bytes=need.total - 1,
        )
    assert caught.value.codes == {"workspace"}


def test_a_tile_schedule_over_the_batch_is_refused_where_bits_must_not_hang_on_it(kit):
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(
            kit.problem(batch_invariant=True), "cuda_flashmla", device=kit.assumed()
        )
    (reason,) = caught.value.refusals
    assert reason.code == "determinism"
    assert Feature.BATCH_INVARIANCE.value in reason.got
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(kit.problem(max_splits=4), "cuda_flashmla", device=kit.assumed())
    assert caught.value.codes == {"feature"}


def test_the_same_call_twice_has_the_same_bits(kit):
    problem = kit.problem(deterministic=True, needs_lse=True)
    step = kit.step(problem, [700, 64, 9])
    first, second = (kit.run(step, problem) for _ in range(2))
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)


@pytest.mark.parametrize("q_dtype", ["bf16", "fp8"])
def test_a_report_names_the_kernels_of_the_dtype(kit, q_dtype):
    problem = kit.problem(q_dtype=q_dtype, query_lens={2})
    device = kit.assumed("sgl")
    decoder = MLADecoder(problem, "cuda_flashmla", device=device)
    decoder.plan(kit.step(problem, [70, 33], 2).common)
    report = decoder.report()
    assert report.kernels == backend.kernel_names(problem, device)
    assert "form" in report.path
    assert report.max_splits == 132
    assert (report.kernel_num_q_heads, report.kernel_query_len) == (16, 2)
