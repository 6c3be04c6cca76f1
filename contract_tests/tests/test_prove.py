"""`prove`: what is caught, what does not apply, and what no proof is."""

import json
import sys
from collections import Counter

import pytest

from mla_decode.device import DeviceInfo
from mla_decode_contract import cli
from mla_decode_contract.catalogue import CASES
from mla_decode_contract.clauses import Clause
from mla_decode_contract.mutants import MUTANTS
from mla_decode_contract.prove import (
    ALARM_CASES,
    ROTATED,
    MutantResult,
    Proof,
    redrawn,
)
from mla_decode_contract.target import Target

pytestmark = pytest.mark.usefixtures("_importable_backends")


def _proof(backend, *names, **settings):
    target = Target(backend=backend, device=DeviceInfo.assume("cpu"))
    proof = Proof(target=target, workers=1, names=names, **settings)
    proof.run()
    return proof


def test_mutants_of_the_reference_are_caught_by_the_broken_clause():
    names = ("lse_log2", "exit_instead_of_refusal", "empty_lse_plus_inf")
    proof = _proof("reference", *names, seeds=2)
    assert proof.is_proven
    told = proof.as_dict()
    identity = {key: told[key] for key in ("backend", "arch", "evidence")}
    assert identity == {
        "backend": "reference",
        "arch": "cpu",
        "evidence": "reference",
    }
    assert [m["name"] for m in told["mutants"]] == list(names)
    assert [m["by"] for m in told["mutants"]] == [
        ["lse.natural_log"],
        ["refuse.undeclared_features"],
        ["empty.one_request"],
    ]
    assert told["false_alarms"] == 0


def test_what_the_backend_lacks_does_not_apply_and_does_not_count():
    proof = _proof("misbehaving:without_lse", "lse_log2", "last_row_unwritten", seeds=0)
    told = proof.as_dict()
    assert told["not_applicable"] == [
        {
            "name": "lse_log2",
            "reason": "needs lse, which the backend declares unsupported",
        }
    ]
    assert [m["name"] for m in told["mutants"]] == ["last_row_unwritten"]


def test_a_correct_backend_that_fails_is_a_false_alarm():
    proof = _proof("misbehaving:os_exit", "empty_lse_plus_inf", seeds=0)
    assert not proof.is_proven
    assert proof.alarms == [
        "empty.all_requests: the process ended itself with status 1"
    ]


def test_a_backend_that_cannot_be_prepared_proves_nothing():
    proof = _proof("misbehaving:unpreparable", "lse_log2", seeds=0)
    assert not proof.is_proven
    assert "no simulator for cpu today" in proof.problem
    assert proof.as_dict()["mutants"] == []
    assert proof.as_dict()["evidence"] is None


@pytest.mark.parametrize("caught", [True, False])
def test_one_that_got_away_is_no_proof(caught):
    proof = Proof(
        target=Target(backend="reference", device=DeviceInfo.assume("cpu")),
        names=("lse_log2", "lse_negated"),
    )
    proof.results["lse_log2"] = MutantResult(name="lse_log2", caught=True, by=("x",))
    proof.results["lse_negated"] = MutantResult(
        name="lse_negated", caught=caught, by=()
    )
    assert proof.is_proven is caught


def test_one_that_was_never_tried_is_no_proof():
    proof = Proof(
        target=Target(backend="reference", device=DeviceInfo.assume("cpu")),
        names=("lse_log2", "lse_negated"),
    )
    proof.results["lse_log2"] = MutantResult(name="lse_log2", caught=True, by=("x",))
    assert not proof.is_proven


def test_an_error_of_the_kit_breaks_the_proof(monkeypatch):
    def broken(plain):
        raise TypeError(f"another form of result: {sorted(plain)[:1]}")

    monkeypatch.setattr("mla_decode_contract.outcome.CaseResult.from_dict", broken)
    with pytest.raises(TypeError, match="another form of result"):
        _proof("reference", "lse_log2", seeds=0)


def test_two_hundred_seeds_draw_every_small_value_case_several_times():
    counted = Counter(case for seed in range(1, 201) for case in redrawn(seed))
    assert set(counted) == {*ALARM_CASES, *ROTATED}
    assert {counted[case] for case in ALARM_CASES} == {200}
    assert min(counted.values()) >= 9
    values = {case.id for case in CASES if case.clause in {Clause.MASK, Clause.LSE}}
    assert values <= set(counted)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reference_is_proven_over_two_hundred_seeds():
    target = Target(backend="reference", device=DeviceInfo.assume("cpu"))
    proof = Proof(target=target)
    proof.run()
    assert proof.alarms == []
    assert proof.is_proven
    assert len(proof.as_dict()["mutants"]) >= 40


def test_a_backend_that_is_no_entry_point_is_told_by_its_own_name():
    target = Target(backend="here:it", device=DeviceInfo.assume("cpu"))
    assert Proof(target=target, backend="mine").as_dict()["backend"] == "mine"


def test_nothing_tried_is_no_proof():
    target = Target(backend="reference", device=DeviceInfo.assume("cpu"))
    assert not Proof(target=target).is_proven


def test_an_unknown_backend_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "prove", "nobody", "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 4
    assert "no backend is named 'nobody'" in capsys.readouterr().err


def test_json_leaves_the_reason_of_no_proof_on_stderr(monkeypatch, capsys):
    arguments = ["x", "prove", "misbehaving:unpreparable", "--seeds", "0", "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as left:
        cli.main()
    printed = capsys.readouterr()
    assert left.value.code == 1
    assert json.loads(printed.out)["mutants"] == []
    assert "no simulator for cpu today" in printed.err


def test_every_mutant_has_a_case_that_runs_anywhere():
    for mutant in MUTANTS.values():
        assert any(case.profile == "cpu" for case in mutant.cases())
