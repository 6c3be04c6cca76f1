"""A case is reported, and not counted, in the minor that it came in."""

import json
import sys
from dataclasses import replace

import pytest

from mla_decode_contract import catalogue, cli, session
from mla_decode_contract.catalogue import BY_ID, CASES
from mla_decode_contract.junit import junit_xml
from mla_decode_contract.merging import merge
from mla_decode_contract.outcome import CaseResult, Failure, FailureKind, Outcome
from mla_decode_contract.report import as_report, validate
from mla_decode_contract.shard import Shard
from mla_decode_contract.summary import plain_lines

NEW = "empty.block"
BAD = CaseResult(
    case=NEW,
    outcome=Outcome.FAILED,
    failure=Failure(kind=FailureKind.VALUE, message="wrong"),
)


@pytest.mark.parametrize(
    ("since", "contract", "provisional"),
    [
        ("1.0", "1.0", False),
        ("1.1", "1.1", True),
        ("1.1", "1.2", False),
        ("1.2", "1.1", True),
        ("1.9", "1.10", False),
        ("1.10", "1.9", True),
        ("2.0", "2.0", False),
        ("1.7", "2.0", False),
        ("2.1", "2.1", True),
    ],
)
def test_a_case_counts_from_the_minor_after_its_own(since, contract, provisional):
    case = replace(CASES[0], since=since)
    assert case.is_provisional(contract) is provisional


def test_nothing_is_provisional_in_the_first_contract():
    assert not [case.id for case in CASES if case.is_provisional("1.0")]


@pytest.fixture
def _new_in_1_1(monkeypatch):
    """One case came in with contract 1.1, which is the installed one."""
    cases = tuple(
        replace(case, since="1.1") if case.id == NEW else case for case in CASES
    )
    for module in (catalogue, session, cli):
        monkeypatch.setattr(module, "CASES", cases)
    monkeypatch.setitem(BY_ID, NEW, replace(BY_ID[NEW], since="1.1"))
    monkeypatch.setattr("mla_decode.version.CONTRACT_VERSION", "1.1")


@pytest.mark.usefixtures("_new_in_1_1")
def test_a_provisional_failure_is_reported_and_not_counted(finished):
    report = as_report(finished(BAD))
    validate(json.loads(json.dumps(report)))
    assert report["contract"]["core"] == "1.1"
    assert report["verdict"] == "conformant (reference, 1 provisional failed)"
    assert report["exit_code"] == 0
    assert report["counts"]["failed"] == 0
    assert report["provisional"]["failed"] == 1
    assert sum(report["counts"].values()) == len(CASES) - 1
    (new,) = [case for case in report["cases"] if case["provisional"]]
    assert new["id"] == NEW
    assert new["repeat"] is not None
    lines = list(plain_lines(report))
    assert "provisional, failed: EMPTY empty.block: [value] wrong" in lines
    assert "provisional, not counted: 1 failed" in lines
    text = junit_xml(report).decode()
    assert 'failures="0"' in text
    assert 'message="provisional: wrong"' in text


@pytest.mark.usefixtures("_new_in_1_1")
def test_one_that_did_not_run_leaves_the_run_complete(finished):
    run = finished()
    del run.results[NEW]
    assert run.verdict().word == "conformant (reference)"
    assert run.verdict().provisional["not_run"] == 1


@pytest.mark.usefixtures("_new_in_1_1")
def test_merged_shards_do_not_count_it_either(finished):
    shards = [Shard(index=index, count=2) for index in (1, 2)]
    reports = [
        as_report(
            finished(
                *([BAD] if BY_ID[NEW] in shard.part(session.CASES) else []), shard=shard
            )
        )
        for shard in shards
    ]
    merged = merge(reports)
    assert (merged["exit_code"], merged["provisional"]["failed"]) == (0, 1)


def test_a_minor_later_the_failure_counts(finished, monkeypatch):
    monkeypatch.setattr("mla_decode.version.CONTRACT_VERSION", "1.2")
    assert finished(BAD).verdict().exit_code == 1


def _main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["mla-decode-contract", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


@pytest.mark.usefixtures("_new_in_1_1")
def test_list_says_which_are_provisional(monkeypatch, capsys):
    assert _main(monkeypatch, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [case["id"] for case in listed if case["provisional"]] == [NEW]
    monkeypatch.setenv("COLUMNS", "240")
    assert _main(monkeypatch, "list") == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "provisional" in x]
    assert NEW in line


@pytest.mark.usefixtures("_new_in_1_1")
def test_pytest_takes_its_failure_for_an_expected_one(monkeypatch, capfd):
    arguments = ("--mutant", "empty_lse_plus_inf", "--workers", "1", "--", "-rx")
    code = _main(monkeypatch, "run", "reference", *arguments, "-k", NEW)
    printed = capfd.readouterr().out
    assert code == 3, printed  # nothing that counts was run
    assert "XFAIL" in printed
    assert "1 xfailed" in printed
