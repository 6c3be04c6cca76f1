"""What is said of memory, splits and bits, against what a builder holds."""

import pytest
import torch
from aiter_steps import Step, device_of, problem_of
from hypothesis import given
from hypothesis import strategies as st

from mla_decode import BackendRefused, Mask, MLADecoder, OutdatedLibraryError
from mla_decode.workspace import core_bytes, held_bytes
from mla_decode_rocm_aiter import backend
from mla_decode_rocm_aiter.profiles import known_releases

problems = st.builds(
    problem_of,
    heads=st.integers(1, 128),
    q=st.sets(st.integers(1, 6), min_size=1, max_size=3),
    causal=st.booleans(),
    dtypes=st.sampled_from(["bf16 bf16", "fp8 fp8", "bf16 fp8"]),
    max_num_reqs=st.integers(1, 40),
    max_model_len=st.integers(6, 300),
    graphs=st.booleans(),
)
devices = st.builds(
    device_of, st.sampled_from(["gfx942", "gfx950"]), st.sampled_from(known_releases())
)


@given(problem=problems, device=devices)
def test_a_builder_holds_what_the_cost_says(problem, device):
    if backend.refusals(problem, device):
        with pytest.raises((BackendRefused, OutdatedLibraryError)):
            backend.builder_cls(problem, device)
        return
    builder = backend.builder_cls(problem, device)
    if builder.padded_heads != problem.num_q_heads:
        builder.padded_query(1)
        builder.padded_output(1)
    held = held_bytes(builder) - core_bytes(problem, joins=False)
    assert held == backend.cost(problem, device).workspace_bytes


def test_a_large_batch_is_refused_by_its_bytes_and_not_by_the_allocator():
    problem = problem_of(
        128, 4, causal=False, dtypes="fp8 fp8", max_num_reqs=512, max_model_len=65536
    )
    device = device_of()
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(problem, "rocm_aiter", device=device, workspace_limit_bytes=1 << 30)
    (reason,) = caught.value.refusals
    assert reason.code == "workspace"
    cost = backend.cost(problem, device)
    assert f"{cost.workspace_bytes} of the backend's builder" in reason.got
    assert f"{cost.call_bytes} inside a call" in reason.got


@pytest.mark.parametrize(
    ("asked", "code"),
    [({"batch_invariant": True}, "determinism"), ({"max_splits": 4}, "feature")],
)
def test_a_split_budget_of_the_whole_batch_is_refused_where_it_may_not_be(asked, code):
    """A schedule shares the compute units out over the batch's requests."""
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(problem_of(**asked), "rocm_aiter", device=device_of())
    assert caught.value.codes == {code}


def test_the_same_step_twice_has_the_same_bits():
    problem = problem_of(16, 3, causal=False, deterministic=True)
    step = Step(problem, device_of(), [300, 41, 9], causal=False)
    builder = backend.builder_cls(problem, device_of())
    (_, first), (_, second) = step.run(builder), step.run(builder)
    assert torch.equal(first.out, second.out)


@pytest.mark.parametrize("num_reqs", [31, 32])
def test_a_report_says_which_path_runs_at_the_batch_where_aiter_drops_schedules(
    num_reqs,
):
    problem = problem_of(16, 1, max_num_reqs=32)
    device = device_of("gfx950")
    decoder = MLADecoder(problem, "rocm_aiter", device=device)
    decoder.plan(Step(problem, device, [9] * num_reqs).common)
    report = decoder.report()
    assert report.path == "a persistent schedule"
    assert report.kernels == tuple(backend.kernel_names(problem, device))
    assert report.max_splits == 256
    assert report.evidence == "simulated, never on AMD"
    assert report.downgrades == ()


def test_a_report_says_what_heads_were_padded_to_and_why_no_schedule_runs():
    device = device_of("gfx942")
    problem = problem_of(128, 1, needs_lse=True)
    decoder = MLADecoder(problem, "rocm_aiter", device=device)
    decoder.plan(Step(problem, device, [40, 100]).common)
    report = decoder.report()
    assert report.path == "no schedule"
    (downgrade,) = report.downgrades
    assert downgrade.taken == "no schedule"
    assert downgrade.reasons[0].startswith("[")
    padded = problem_of(5, 2)
    decoder = MLADecoder(padded, "rocm_aiter", device=device)
    decoder.plan(Step(padded, device, [40, 100]).common)
    report = decoder.report()
    assert (report.num_q_heads, report.kernel_num_q_heads) == (5, 16)
    assert report.mask == Mask.CAUSAL.value
