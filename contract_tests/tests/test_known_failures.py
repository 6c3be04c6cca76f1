"""The exceptions file: every entry has its reason and is held to it."""

import pytest

from mla_decode_contract.known_failures import read_exceptions
from mla_decode_contract.outcome import CaseResult, Failure, FailureKind, Outcome
from mla_decode_contract.session import Run, Settings
from mla_decode_contract.target import UsageProblem

ENTRY = """
[[known_failure]]
case = "empty.block"
reason = "the kernel writes +inf"
issue = "example/repo#1"
"""
TOLERANCE = """
[[tolerance]]
case = "lengths.one_key"
units = 6
reason = "weights in fp8"
"""


def _file(tmp_path, text):
    path = tmp_path / "known.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _run(tmp_path, text):
    settings = Settings(backend="reference", known_failures=_file(tmp_path, text))
    return Run.prepare(settings)


def test_entries_carry_reason_and_issue(tmp_path):
    exceptions = read_exceptions(_file(tmp_path, ENTRY + TOLERANCE))
    assert exceptions.known("empty.block").issue == "example/repo#1"
    assert exceptions.known("lengths.one_key") is None
    assert exceptions.budgets == {"lengths.one_key": 6.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[known_failure]]\ncase = 'empty.block'\nreason = 'r'", "exactly case"),
        (ENTRY.replace("empty.block", "empty.blok"), "no case is named"),
        (ENTRY + ENTRY, "twice"),
        (ENTRY.replace("the kernel writes +inf", " "), "not a text"),
        (ENTRY + "extra = 1", "exactly case"),
        (TOLERANCE.replace("units = 6", "units = 0"), "above 0"),
        (TOLERANCE.replace("units = 6", "units = true"), "above 0"),
        (TOLERANCE.replace("units = 6", "units = nan"), "above 0"),
        (TOLERANCE.replace("units = 6", "units = inf"), "above 0"),
        ("a = " + "[" * 5000, "cannot read"),
        (TOLERANCE.replace('reason = "weights in fp8"', ""), "exactly case, reason"),
        (TOLERANCE.replace("lengths.one_key", "x"), "no case is named"),
        ("[known_failure]\ncase = 'empty.block'", "[[known_failure]] tables"),
        ("[[expected]]\ncase = 'empty.block'", "unknown tables expected"),
        ("not toml", "cannot read"),
    ],
)
def test_refuses_an_entry_that_says_too_little_or_nothing(tmp_path, text, words):
    with pytest.raises(UsageProblem) as caught:
        read_exceptions(_file(tmp_path, text))
    assert words in str(caught.value)


def test_refuses_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageProblem, match="cannot read"):
        read_exceptions(tmp_path / "absent.toml")


def _result(outcome):
    failure = None
    if outcome is Outcome.FAILED:
        failure = Failure(kind=FailureKind.VALUE, message="wrong")
    return CaseResult(case="empty.block", outcome=outcome, failure=failure)


def test_a_known_failure_that_fails_is_counted_apart(tmp_path):
    held = _run(tmp_path, ENTRY)._hold_to_word(_result(Outcome.FAILED))
    assert held.outcome is Outcome.KNOWN_FAILURE
    assert held.failure.message == "wrong"
    assert held.notes == ("known failure: the kernel writes +inf (example/repo#1)",)


@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.REFUSED])
def test_a_known_failure_that_does_not_fail_fails(tmp_path, outcome):
    held = _run(tmp_path, ENTRY)._hold_to_word(_result(outcome))
    assert held.outcome is Outcome.FAILED
    assert "remove its entry" in held.failure.message


def test_other_cases_are_left_alone(tmp_path):
    run = _run(tmp_path, ENTRY)
    other = CaseResult(case="lengths.one_key", outcome=Outcome.PASSED)
    assert run._hold_to_word(other) is other


def test_an_overridden_budget_reaches_the_workers(tmp_path):
    assert _run(tmp_path, TOLERANCE).pool.budgets == {"lengths.one_key": 6.0}
