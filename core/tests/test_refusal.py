"""Refusals as data: codes that tools match on, and what the documentation says of them."""

import copy

import pytest

from mla_decode import Refusal, RefusalCode


@pytest.mark.parametrize("code", RefusalCode)
def test_a_code_is_its_value_everywhere(code):
    assert RefusalCode(code.value) is code
    assert code == code.value
    assert f"{code}" == code.value
    assert copy.deepcopy(code) is code


def test_every_code_knows_a_cause_and_a_remedy_of_its_own():
    said = [text for code in RefusalCode for text in (code.cause, code.remedy)]
    assert all(said)
    assert len(set(said)) == len(said)


def test_a_refusal_says_what_was_asked_what_is_allowed_and_what_to_do():
    refusal = Refusal(
        code=RefusalCode.MASK, message="No.", got="a", allowed="b", fix="c"
    )
    assert str(refusal) == "[mask] No. (got a; allowed: b; fix: c)"
    assert refusal.as_dict() == {
        "code": "mask",
        "message": "No.",
        "got": "a",
        "allowed": "b",
        "fix": "c",
    }
