"""Merging shards: one verdict, and only of parts of one run."""

import json
import random
import sys

import pytest

from mla_decode_contract import cli
from mla_decode_contract.catalogue import BY_ID
from mla_decode_contract.merging import NotOneRun, merge
from mla_decode_contract.outcome import CaseResult, Failure, FailureKind, Outcome
from mla_decode_contract.report import as_report, validate, write_reports
from mla_decode_contract.shard import Shard

BAD = CaseResult(
    case="empty.block",
    outcome=Outcome.FAILED,
    failure=Failure(kind=FailureKind.VALUE, message="wrong"),
)


@pytest.fixture
def shards(finished):
    """Reports of the three shards of one run, a case of them failed where asked."""

    def make(*results, count=3, **settings):
        reports = []
        for index in range(1, count + 1):
            shard = Shard(index=index, count=count)
            mine = {case.id for case in shard.part(tuple(BY_ID.values()))}
            held = [result for result in results if result.case in mine]
            run = finished(*held, shard=shard, **settings)
            reports.append(json.loads(json.dumps(as_report(run))))
        return reports

    return make


def test_shards_in_any_order_are_the_whole(shards, finished):
    reports = shards()
    whole = as_report(finished())
    random.Random(1).shuffle(reports)  # noqa: S311 - an order, no secret
    merged = merge(reports)
    validate(json.loads(json.dumps(merged)))
    assert merged["shard"] is None
    assert merged["merged_from"] == 3
    for key in ("verdict", "exit_code", "counts", "not_run", "known_failures"):
        assert merged[key] == whole[key]
    assert [case["id"] for case in merged["cases"]] == list(BY_ID)


def test_one_failure_fails_the_whole_and_keeps_its_command(shards):
    merged = merge(shards(BAD))
    assert (merged["exit_code"], merged["verdict"]) == (1, "not conformant (reference)")
    (failed,) = [case for case in merged["cases"] if case["outcome"] == "failed"]
    assert "--case empty.block" in failed["repeat"]


def test_an_absent_shard_leaves_the_whole_incomplete_and_its_cases_named(shards):
    reports = shards()
    absent = {case["id"] for case in reports[1]["cases"]}
    merged = merge([reports[0], reports[2]])
    validate(json.loads(json.dumps(merged)))
    assert (merged["exit_code"], merged["verdict"]) == (3, "INCOMPLETE (reference)")
    assert set(merged["not_run"]) == absent


def test_a_shard_that_prepared_nothing_does_not_hide_the_machine_of_the_others(shards):
    reports = shards()
    for key in ("evidence", "torch", "device_name"):
        reports[0][key] = None
    reports[2]["torch"] = reports[1]["torch"] = "2.13.0"
    assert merge(reports)["torch"] == "2.13.0"


def _versions(report):
    report["core"]["version"] = "9.9"


def _libraries(report):
    report["libraries"] = {"amd-aiter": "0.1.19"}


def _whole(report):
    report["shard"] = None


def _of_four(report):
    report["shard"]["count"] = 4


def _first(report):
    report["shard"]["index"] = 1


def _other_arch(report):
    report["device"]["arch"] = "gfx942"


def _other_seed(report):
    report["seed"] = 5


def _case_dropped(report):
    report["cases"].pop()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_versions, "differ in core"),
        (_libraries, "differ in libraries"),
        (_other_arch, "differ in device.arch"),
        (_other_seed, "differ in seed"),
        (_whole, "takes reports of shards"),
        (_of_four, "not parts of one whole"),
        (_first, "not parts of one whole"),
        (_case_dropped, "does not hold its own cases"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_no_part_of_the_run_is_not_merged(shards, change, words):
    reports = shards()
    change(reports[2])
    with pytest.raises(NotOneRun, match=words) as caught:
        merge(reports)
    assert caught.value.got
    assert caught.value.allowed
    assert caught.value.fix


def test_shards_of_another_kit_are_not_merged(shards):
    reports = shards()
    for report in reports:
        report["kit"]["version"] = "0.0.1"
    with pytest.raises(NotOneRun, match=r"Another version of the kit.*0\.0\.1"):
        merge(reports)


def _main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["mla-decode-contract", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


@pytest.mark.parametrize(
    ("results", "taken", "code"), [((), 3, 0), ((BAD,), 3, 1), ((), 2, 3)]
)
def test_the_command_exits_as_a_run_does(
    monkeypatch, capsys, tmp_path, shards, results, taken, code
):
    folders = [tmp_path / str(number) for number in range(taken)]
    for report, folder in zip(shards(*results), folders, strict=False):
        write_reports(report, folder)
    whole = tmp_path / "whole"
    assert _main(monkeypatch, "merge", *folders, "--report", whole) == code
    printed = capsys.readouterr().out
    written = json.loads((whole / "report.json").read_text(encoding="utf-8"))
    assert written["exit_code"] == code
    assert printed.splitlines()[-1] == f"verdict: {written['verdict']}"
    assert (whole / "junit.xml").is_file()


def test_the_command_says_what_cannot_be_merged(monkeypatch, capsys, tmp_path, shards):
    (report, *_) = shards()
    write_reports(report, tmp_path)
    assert _main(monkeypatch, "merge", tmp_path, tmp_path) == 4
    assert "not parts of one whole" in capsys.readouterr().err


@pytest.mark.timeout(900)  # two runs, on a loaded machine
def test_shards_that_ran_are_merged_to_a_conformant_run(monkeypatch, capfd, tmp_path):
    folders = [tmp_path / "1", tmp_path / "2"]
    for index, folder in enumerate(folders, 1):
        arguments = ("--quick", "--shard", f"{index}/2", "--report", folder)
        assert _main(monkeypatch, "run", "reference", *arguments) == 3
        assert f"shard {index}/2, which held" in capfd.readouterr().out
    assert _main(monkeypatch, "merge", *folders) == 0
    assert "verdict: conformant (reference, quick)" in capfd.readouterr().out
