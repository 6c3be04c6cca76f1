"""One verdict: only what was run and held is conformant."""

import json

import jsonschema
import pytest

from mla_decode_contract.catalogue import BY_ID
from mla_decode_contract.junit import junit_xml
from mla_decode_contract.outcome import (
    CaseResult,
    Failure,
    FailureKind,
    Measurement,
    Outcome,
)
from mla_decode_contract.report import as_report, validate, write_reports
from mla_decode_contract.shard import Shard
from mla_decode_contract.summary import plain_lines
from mla_decode_contract.verdict import judge

PASSED, REFUSED, FAILED = Outcome.PASSED, Outcome.REFUSED, Outcome.FAILED
KNOWN, HARDWARE, NOT_RUN = (
    Outcome.KNOWN_FAILURE,
    Outcome.NEEDS_HARDWARE,
    Outcome.NOT_RUN,
)


def _results(*outcomes):
    ids = list(BY_ID)
    return {
        ids[n]: CaseResult(case=ids[n], outcome=outcome)
        for n, outcome in enumerate(outcomes)
    }


@pytest.mark.parametrize(
    ("outcomes", "profile", "quick", "word", "code"),
    [
        ((PASSED, REFUSED), "cpu", False, "conformant (simulated)", 0),
        ((PASSED, REFUSED), "cpu", True, "conformant (simulated, quick)", 0),
        ((PASSED, HARDWARE), "cpu", False, "conformant (simulated)", 0),
        ((PASSED, HARDWARE), "device", False, "INCOMPLETE (simulated)", 3),
        ((PASSED, NOT_RUN), "cpu", False, "INCOMPLETE (simulated)", 3),
        ((PASSED, FAILED), "cpu", False, "not conformant (simulated)", 1),
        ((PASSED, FAILED, NOT_RUN), "cpu", False, "not conformant (simulated)", 1),
        ((HARDWARE,), "cpu", False, "INCOMPLETE (simulated)", 3),
        ((KNOWN,), "cpu", False, "INCOMPLETE (simulated)", 3),
        ((), "cpu", False, "INCOMPLETE (simulated)", 3),
        (
            (PASSED, KNOWN),
            "cpu",
            False,
            "conformant (simulated, except 1 known failure)",
            0,
        ),
    ],
)
def test_verdicts(outcomes, profile, quick, word, code):
    verdict = judge(
        _results(*outcomes), evidence="simulated", profile=profile, is_quick=quick
    )
    assert (verdict.word, verdict.exit_code) == (word, code)


@pytest.mark.parametrize(
    ("outcomes", "word", "code"),
    [
        ((PASSED, HARDWARE), "INCOMPLETE (simulated, shard 2/3, which held)", 3),
        ((PASSED, NOT_RUN), "INCOMPLETE (simulated, shard 2/3)", 3),
        ((PASSED, FAILED), "not conformant (simulated, shard 2/3)", 1),
    ],
)
def test_a_shard_is_never_conformant(outcomes, word, code):
    verdict = judge(
        _results(*outcomes),
        evidence="simulated",
        profile="cpu",
        is_quick=False,
        shard=Shard(index=2, count=3),
    )
    assert (verdict.word, verdict.exit_code) == (word, code)


def test_the_only_shard_of_one_is_the_whole():
    verdict = judge(
        _results(PASSED),
        evidence="simulated",
        profile="cpu",
        is_quick=False,
        shard=Shard(index=1, count=1),
    )
    assert (verdict.word, verdict.exit_code) == ("conformant (simulated)", 0)


MEASURED = Measurement(quantity="out", units=5.0, budget=4.0, error=0.5, unit=0.1)
BAD = CaseResult(
    case="empty.block",
    outcome=FAILED,
    duration_s=0.5,
    failure=Failure(
        kind=FailureKind.CONTAINMENT, message="ended \x00 by it", signal="SIGSEGV"
    ),
    measurements=(MEASURED,),
)


def test_a_result_survives_the_journey_from_a_worker():
    plain = json.loads(json.dumps(BAD.as_dict()))
    assert CaseResult.from_dict(plain) == BAD


def test_of_several_results_for_a_case_the_worst_stays(finished):
    good = CaseResult(case="empty.block", outcome=PASSED)
    for order in ((BAD, good), (good, BAD)):
        run = finished(*order, passes=False)
        assert run.all_results()["empty.block"].outcome is FAILED


def test_the_report_names_who_and_what_and_keeps_its_schema(finished, tmp_path):
    run = finished(BAD, passes=False)
    report = write_reports(as_report(run), tmp_path / "out")
    assert json.loads((tmp_path / "out/report.json").read_text()) == report
    for key in ("contract", "kit", "core", "adapter", "seed", "started_at", "device"):
        assert report[key] is not None
    assert report["adapter"]["distribution"] == "mla-decode"
    assert report["verdict"] == "not conformant (reference)"
    assert report["counts"]["failed"] == 1
    assert report["counts"]["not_run"] == len(BY_ID) - 1
    (failed,) = [case for case in report["cases"] if case["outcome"] == "failed"]
    assert failed["failure"]["signal"] == "SIGSEGV"


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": None},
        {"exit_code": 2},
        {"evidence": "real"},
        {"surprise": 1},
        {"shard": {"index": 0, "count": 2}},
        {"merged_from": -1},
    ],
)
def test_a_report_of_another_form_is_refused(finished, change):
    report = as_report(finished(BAD))
    with pytest.raises(jsonschema.ValidationError):
        validate({**report, **change})


def test_junit_holds_the_identity_and_every_case(finished):
    text = junit_xml(as_report(finished(BAD))).decode()
    assert text.count("<testcase ") == len(BY_ID)
    assert 'failures="1"' in text
    assert '<property name="contract" value="1.0"' in text
    assert 'message="ended  by it"' in text
    assert 'name="shard"' not in text


def test_junit_says_which_shard_it_is(finished):
    shard = Shard(index=2, count=3)
    text = junit_xml(as_report(finished(shard=shard))).decode()
    assert '<property name="shard" value="2/3"' in text
    assert text.count("<testcase ") == len(shard.part(tuple(BY_ID.values())))


def test_the_summary_ends_with_the_verdict_and_says_how_to_repeat(finished):
    run = finished(BAD, passes=False, seed=7)
    lines = list(plain_lines(as_report(run)))
    assert lines[0].startswith("reference: reference 0.")
    assert lines[-1] == "verdict: not conformant (reference)"
    assert any("5 of 4 units" in line for line in lines)
    assert f"  repeat: {run.command('empty.block')}" in lines


def test_the_summary_of_a_shard_says_that_it_proves_nothing(finished):
    lines = list(plain_lines(as_report(finished(shard=Shard(index=1, count=3)))))
    assert lines[0].endswith(", shard 1/3")
    assert "a shard proves no conformance" in lines[-2]
