"""Wrong answers that a failure knows again, where no mutant is exactly that one."""

import pytest

from mla_decode.device import DeviceInfo
from mla_decode_contract.mutants.faulty import Fault
from mla_decode_contract.mutants.values import with_fault
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target

TARGET = Target(backend="reference", device=DeviceInfo.assume("cpu"))


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
def test_an_answer_without_one_scale_is_said_to_be_that(reference, name):
    wrong = with_fault(Fault(), reference, lambda scales: {**scales, name: None})
    failure = run_case("scale.fp8_is_applied", wrong, TARGET).failure
    assert failure.message.endswith(f"; it is the answer without {name}")


def test_a_key_that_is_read_past_the_end_is_said_to_be_one(reference):
    fault = Fault(visible=lambda block: block.true_visible() + 1)
    wrong = with_fault(fault, reference)
    failure = run_case("reads.page_tail_large", wrong, TARGET).failure
    assert "one key too many: each row reads one past its last" in failure.message
