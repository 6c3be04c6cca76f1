"""Two reports compared: what got worse decides, what is news is told."""

import copy
import json
import sys
from dataclasses import replace

import pytest

from mla_decode.capability import CapabilityRow, Feature, Support
from mla_decode.device import DeviceInfo
from mla_decode.mask import Mask
from mla_decode_contract import cli
from mla_decode_contract.declaration import declaration
from mla_decode_contract.diffing import NotComparable, compare
from mla_decode_contract.outcome import CaseResult, Failure, FailureKind, Outcome
from mla_decode_contract.report import as_report, write_reports
from mla_decode_contract.shard import Shard

CASE = "empty.block"
BAD = CaseResult(
    case=CASE,
    outcome=Outcome.FAILED,
    failure=Failure(kind=FailureKind.VALUE, message="lse is +inf"),
)
ROW = CapabilityRow(
    arch="cpu",
    dtypes=frozenset({("bf16", "bf16"), ("fp8", "fp8")}),
    out_dtypes=frozenset({"bf16"}),
    page_sizes=frozenset({16, 64}),
    num_q_heads=range(1, 129),
    query_lens={Mask.CAUSAL: range(1, 9), Mask.NON_CAUSAL: range(2, 9)},
    features={Feature.LSE: Support.YES},
    max_num_reqs=64,
)


def _report(run):
    return json.loads(json.dumps(as_report(run)))


@pytest.fixture
def old(finished):
    report = _report(finished())
    report["declared"] = _declared()
    return report


@pytest.fixture
def new(old):
    return copy.deepcopy(old)


class _Declares:
    """As much of a backend as `declaration` asks where nothing is accepted."""

    name = "reference"

    def __init__(self, row):
        self.row = row
        self.capability = self

    def refusals(self, problem, device):
        del problem, device
        return ["all"]


def _declared(**changes):
    row = replace(ROW, **changes)
    device = DeviceInfo.assume("cpu")
    fake = _Declares(lambda _: row)
    return json.loads(json.dumps(declaration(fake, device)))


def test_the_same_report_is_not_worse(old, new):
    found = compare(old, new)
    assert not found.is_worse
    assert found.worse == found.better == found.new == found.gone == ()
    assert found.limits == found.drift == found.slower == ()


def _set_outcome(report, outcome, case=CASE):
    (entry,) = [entry for entry in report["cases"] if entry["id"] == case]
    entry["outcome"] = outcome
    return entry


RANKED = ["passed", "refused", "known_failure", "failed"]


@pytest.mark.parametrize("was", RANKED)
@pytest.mark.parametrize("now", RANKED)
def test_a_case_that_shows_less_is_worse(old, new, was, now):
    _set_outcome(old, was)
    _set_outcome(new, now)
    found = compare(old, new)
    assert found.is_worse is (RANKED.index(now) > RANKED.index(was))
    changes = found.worse if found.is_worse else found.better
    assert [(c.case, c.was, c.now) for c in changes] == (
        [] if was == now else [(CASE, was, now)]
    )


def test_a_failure_comes_with_its_message_and_command(old, finished):
    found = compare(old, _report(finished(BAD)))
    (change,) = found.worse
    assert change.message == "lse is +inf"
    assert "--case empty.block" in change.repeat
    assert found.is_verdict_worse
    assert found.is_worse


def test_a_provisional_case_makes_nothing_worse(old, new):
    _set_outcome(new, "failed")["provisional"] = True
    found = compare(old, new)
    assert [change.provisional for change in found.worse] == [True]
    assert not found.is_worse


def test_new_cases_are_news_and_gone_cases_are_worse(old, new):
    case = old["cases"].pop()
    found = compare(old, new)
    assert [change.case for change in found.new] == [case["id"]]
    assert not found.is_worse
    back = compare(new, old)
    assert [change.case for change in back.gone] == [case["id"]]
    assert back.is_worse


@pytest.mark.parametrize(
    ("change", "what", "narrower"),
    [
        ({"num_q_heads": range(1, 65)}, "num_q_heads", True),
        ({"num_q_heads": range(1, 257)}, "num_q_heads", False),
        ({"num_q_heads": range(2, 129, 2)}, "num_q_heads", True),
        ({"num_q_heads": frozenset(range(1, 129))}, "num_q_heads", False),
        ({"page_sizes": frozenset({64})}, "page_sizes", True),
        ({"page_sizes": range(1, 65)}, "page_sizes", False),
        ({"query_lens": {Mask.CAUSAL: range(1, 9)}}, "query_lens non_causal", True),
        ({"dtypes": frozenset({("bf16", "bf16")})}, "dtypes", True),
        ({"out_dtypes": frozenset({"bf16", "fp16"})}, "out_dtypes", False),
        ({"features": {Feature.LSE: Support.NEEDS_VERSION}}, "features", True),
        ({"max_num_reqs": None}, "max_num_reqs", False),
        ({"max_num_reqs": 32}, "max_num_reqs", True),
        ({"max_model_len": 4096}, "max_model_len", True),
    ],
)
def test_a_narrower_limit_is_worse_and_a_wider_one_is_not(
    old, new, change, what, narrower
):
    new["declared"] = _declared(**change)
    found = compare(old, new)
    assert [(limit.what, limit.is_narrower) for limit in found.limits] == [
        (what, narrower)
    ]
    assert found.is_worse is narrower


@pytest.mark.parametrize("narrower", [True, False])
def test_a_shape_that_is_answered_otherwise_is_a_limit_too(old, new, narrower):
    cell = {"num_q_heads": 8, "query_len": 3, "mask": "non_causal"}
    answers = [[], ["num_heads"]] if narrower else [["num_heads"], []]
    for report, refused in zip((old, new), answers, strict=True):
        report["declared"]["cells"] = [{**cell, "refused": refused}]
    (limit,) = compare(old, new).limits
    assert limit.what == "8 heads, non_causal block of 3"
    assert limit.is_narrower is narrower


def test_a_report_without_limits_says_nothing_of_them(old, new):
    old["declared"] = None
    assert compare(old, new).limits == ()


def test_versions_that_drifted_are_named_and_make_nothing_worse(old, new):
    old["libraries"] = {"amd-aiter": "0.1.19.post2"}
    new["libraries"] = {"amd-aiter": "0.1.20.post1", "triton": "3.9.0"}
    new["torch"] = "2.14.0"
    found = compare(old, new)
    assert {(d.what, d.was, d.now) for d in found.drift} == {
        ("library amd-aiter", "0.1.19.post2", "0.1.20.post1"),
        ("library triton", None, "3.9.0"),
        ("torch", None, "2.14.0"),
    }
    assert not found.is_worse


def test_a_case_that_takes_longer_is_named_and_makes_nothing_worse(old, new):
    for index, (was, now) in enumerate([(0.1, 0.4), (1.0, 1.9), (1.0, 2.6)]):
        old["cases"][index]["duration_s"] = was
        new["cases"][index]["duration_s"] = now
    found = compare(old, new)
    assert [slow.case for slow in found.slower] == [old["cases"][2]["id"]]
    assert not found.is_worse


def test_an_incomplete_run_is_worse_than_a_whole_one(old, new):
    new["exit_code"], new["verdict"] = 3, "INCOMPLETE (reference)"
    assert compare(old, new).is_worse
    assert not compare(new, old).is_worse


def _shard(report):
    report["shard"] = {"index": 1, "count": 2}


def _mutant(report):
    report["mutant"] = "lse_log2"


def _backend(report):
    report["adapter"]["backend"] = "triton_mla"


def _arch(report):
    report["device"]["arch"] = "sm_90"


@pytest.mark.parametrize("change", [_shard, _mutant, _backend, _arch])
@pytest.mark.parametrize("side", [0, 1])
def test_what_says_nothing_of_the_other_is_not_compared(old, new, change, side):
    change((old, new)[side])
    with pytest.raises(NotComparable) as caught:
        compare(old, new)
    assert caught.value.fix


def _diff(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["x", "diff", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


@pytest.fixture
def written(tmp_path, finished):
    """A conformant report, and one of the same backend with a failure."""
    folders = tmp_path / "old", tmp_path / "new"
    for folder, results in zip(folders, [(), (BAD,)], strict=True):
        write_reports(as_report(finished(*results)), folder)
    return folders


def test_the_command_tells_worse_from_not_worse(monkeypatch, capsys, written):
    old, new = written
    assert _diff(monkeypatch, old, new) == 1
    printed = capsys.readouterr().out
    assert "worse     EMPTY empty.block: passed -> failed: lse is +inf" in printed
    assert "repeat: mla-decode-contract run reference" in printed
    assert printed.endswith("WORSE\n")
    assert _diff(monkeypatch, new, old) == 0
    assert "better    EMPTY empty.block: failed -> passed" in capsys.readouterr().out


def test_the_command_prints_json(monkeypatch, capsys, written):
    assert _diff(monkeypatch, *written, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["is_worse"] is True
    assert [change["case"] for change in told["worse"]] == [CASE]
    assert told["verdict_now"] == "not conformant (reference)"


def test_a_shard_or_a_foreign_file_exits_with_4(
    monkeypatch, capsys, tmp_path, written, finished
):
    write_reports(as_report(finished(shard=Shard(index=1, count=2))), tmp_path)
    assert _diff(monkeypatch, tmp_path, written[0]) == 4
    assert "`merge` the shards first" in capsys.readouterr().err
    foreign = tmp_path / "package.json"
    foreign.write_text('{"name": "x"}', encoding="utf-8")
    assert _diff(monkeypatch, written[0], foreign) == 4
    assert "is no report of the contract kit" in capsys.readouterr().err
