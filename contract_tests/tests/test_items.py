"""What a failing case tells people: what it demands, what came, how to repeat it."""

import pytest

from mla_decode_contract.catalogue import BY_ID
from mla_decode_contract.items import CaseFailed
from mla_decode_contract.outcome import CaseResult, Failure, FailureKind, Outcome

CASE = BY_ID["mask.causal.tail_aligned"]


def _told(kind):
    failure = Failure(kind=kind, message="out is off", detail="a frame\n")
    result = CaseResult(case=CASE.id, outcome=Outcome.FAILED, failure=failure)
    return str(CaseFailed(CASE, result, "the command")).splitlines()


def test_a_wrong_value_is_told_without_the_kits_own_frames():
    assert _told(FailureKind.VALUE) == [
        f"demands: {CASE.purpose}",
        "[value] out is off",
        "repeat: the command",
    ]


@pytest.mark.parametrize("kind", [k for k in FailureKind if k is not FailureKind.VALUE])
def test_what_another_raised_is_told_with_its_frames(kind):
    assert "a frame" in _told(kind)
