"""The reference keeps the contract, case by case, and for a reason."""

import pytest

from mla_decode.device import DeviceInfo
from mla_decode_contract.catalogue import CASES
from mla_decode_contract.outcome import Outcome
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target

ON_CPU = [case for case in CASES if case.profile == "cpu"]


@pytest.mark.parametrize("case", ON_CPU, ids=lambda case: case.id)
def test_the_reference_keeps_the_contract(case, reference, target):
    result = run_case(case.id, reference, target)
    due = Outcome.REFUSED if "graphs" in case.features else Outcome.PASSED
    assert (result.outcome, result.failure) == (due, None)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "case_id", ["mask.does_not_stick", "lengths.ragged_requests", "lse.large_scores"]
)
def test_other_seeds_draw_other_data_and_raise_no_alarm(case_id, seed, reference):
    device = DeviceInfo.assume("cpu")
    runs = [
        run_case(
            case_id, reference, Target(backend="reference", device=device, seed=seed)
        )
        for seed in (0, seed)
    ]
    assert [run.outcome for run in runs] == [Outcome.PASSED] * 2
    first, other = (run.measurements[0].error for run in runs)
    assert first != other


def test_an_assumed_arch_without_the_hook_runs_on_cpu_tensors(reference):
    target = Target(backend="reference", device=DeviceInfo.assume("gfx942"))
    result = run_case("scale.fp8_is_applied", reference, target)
    assert result.outcome is Outcome.PASSED


def test_measurements_say_what_the_budget_was(reference, target):
    result = run_case("lengths.ragged_requests", reference, target)
    assert [m.quantity for m in result.measurements] == ["out", "lse"]
    assert all(0 < m.units <= m.budget == 4.0 for m in result.measurements)


def test_a_smaller_budget_fails(reference, target):
    result = run_case("lengths.ragged_requests", reference, target, budget_units=1e-3)
    assert result.outcome is Outcome.FAILED
    assert "budget 0.001" in result.failure.message
