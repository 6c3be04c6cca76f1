"""`ubatch.no_global_state`: what steps write is found, however often they wrote it."""

import functools
import os

import pytest
import torch

from mla_decode.device import DeviceInfo
from mla_decode_contract.global_state import GlobalState, first_state
from mla_decode_contract.mutants.mutant import derive
from mla_decode_contract.outcome import FailureKind, Outcome
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target

TARGET = Target(backend="reference", device=DeviceInfo.assume("cpu"))
NAME = "MLA_DECODE_TEST_OF_GLOBAL_STATE"


@pytest.fixture(autouse=True)
def _as_it_was():
    first_state()
    before = GlobalState.now()
    yield
    before.restore()


def _writing(backend, write):
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self, *args, **kwargs):
        write()
        return right(self, *args, **kwargs)

    return derive(backend, forward=forward)


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda: os.environ.update({NAME: "1"}), f"os.environ['{NAME}']"),
        (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
    ],
    ids=["environment", "default_dtype"],
)
def test_a_value_that_is_written_at_every_step_is_found_after_other_cases(
    reference, write, named
):
    wrong = _writing(reference, write)
    run_case("lengths.one_key", wrong, TARGET)
    result = run_case("ubatch.no_global_state", wrong, TARGET)
    assert result.failure.kind is FailureKind.VALUE
    assert f"a step changed {named}: every other builder" in result.failure.message


def test_what_a_library_sets_when_it_is_imported_is_its_own(reference):
    imported = []

    def write():
        if not imported:
            imported.append("the library")
            os.environ[NAME] = "1"

    result = run_case("ubatch.no_global_state", _writing(reference, write), TARGET)
    assert result.outcome is Outcome.PASSED
    assert os.environ[NAME] == "1"


def test_a_library_may_need_what_it_set_when_it_was_imported(reference):
    imported = []

    def write():
        if not imported:
            imported.append("the library")
            os.environ[NAME] = "1"
        assert os.environ[NAME] == "1"

    result = run_case("ubatch.no_global_state", _writing(reference, write), TARGET)
    assert result.outcome is Outcome.PASSED
    assert result.notes[-1].startswith("compared from the first step on")


def test_a_state_is_put_back_whole():
    before = GlobalState.now()
    os.environ[NAME] = "1"
    torch.set_default_dtype(torch.float64)
    torch.rand(3)
    changed = before.changed_by(GlobalState.now())
    before.restore()
    assert changed == [f"os.environ['{NAME}']", "the default dtype", "the random state"]
    assert before.changed_by(GlobalState.now()) == []
