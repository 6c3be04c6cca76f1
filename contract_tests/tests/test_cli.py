"""The command line: exit statuses that CI can trust."""

import json
import re
import sys

import pytest

from mla_decode_contract import cli
from mla_decode_contract.catalogue import CASES


def _main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["mla-decode-contract", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


def test_version_prints_the_kits_and_the_contracts(capsys, monkeypatch):
    assert _main(monkeypatch, "--version") == 0
    assert re.fullmatch(
        r"mla-decode-contract \d+\.\d+\S* \(contract 1\.0\)\n", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        ([], "every case: its clause, profile, features and purpose"),
        (["run"], "--known-failures"),
        (["prove"], "--assume-arch"),
    ],
)
def test_help_is_whole_at_60_columns(capsys, monkeypatch, arguments, whole):
    monkeypatch.setenv("COLUMNS", "60")
    assert _main(monkeypatch, *arguments, "--help") == 0
    out = capsys.readouterr().out
    assert whole in " ".join(out.split())
    assert "..." not in out.replace("REPORT...", "").replace("]]...", "").replace(
        "[ARGS]...", ""
    )
    assert max(map(len, out.splitlines())) <= 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "no_such_backend"], "no backend is named 'no_such_backend'"),
        (["run", "reference", "--no-such-option"], "No such option"),
        (["run"], "BACKEND"),
        (["frobnicate"], "frobnicate"),
        (["run", "reference", "--case", "mask.nope"], "no case is named 'mask.nope'"),
        (["run", "reference", "--arch", "gfx950"], "needs that hardware"),
        (["run", "reference", "--assume-arch", "riscv"], "no known form"),
        (["run", "reference", "--assume-arch", "gfx0ff"], "declares nothing for"),
        (
            ["run", "reference", "--arch", "cpu", "--assume-arch", "cpu"],
            "exclude each other",
        ),
        (["run", "reference", "--known-failures", "absent.toml"], "cannot read"),
        (["run", "no.such.module:backend"], "cannot load backend"),
        (["run", "math:no_backend"], "cannot load backend"),
        (["run", "math:pi"], "'math:pi' is no backend"),
        (["run", "reference", "--report", "/dev/null/x"], "Choose another --report"),
        (["run", "reference", "--", "--no-such-pytest-option"], "unrecognized"),
        (["run", "reference", "--seed", "x"], "--seed"),
        (["run", "reference", "--mutant", "mask_igored"], "no mutant is named"),
        (["run", "reference", "--shard", "3/2"], "names no part of a whole"),
        (["run", "reference", "--shard", "0/2"], "names no part of a whole"),
        (["run", "reference", "--shard", "half"], "names no part of a whole"),
        (["merge"], "REPORT"),
        (["merge", "absent.json"], "cannot be read"),
        (["diff", "absent.json"], "NEW"),
    ],
)
def test_usage_errors_exit_with_4(monkeypatch, capfd, arguments, words):
    assert _main(monkeypatch, *arguments) == 4
    captured = capfd.readouterr()
    assert words in " ".join((captured.out + captured.err).split())


@pytest.mark.usefixtures("_importable_backends")
def test_a_backend_without_the_hook_cannot_be_assumed(monkeypatch, capfd):
    arguments = ("run", "misbehaving:abort", "--assume-arch", "gfx942")
    assert _main(monkeypatch, *arguments) == 4
    assert "no simulator or interpreter" in capfd.readouterr().err


def test_list_as_json_is_the_catalogue(monkeypatch, capsys):
    assert _main(monkeypatch, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == [{**case.as_dict(), "provisional": False} for case in CASES]


def test_list_for_people_names_every_case(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert _main(monkeypatch, "list") == 0
    printed = capsys.readouterr().out
    assert all(case.id in printed for case in CASES)
    assert all(case.purpose in " ".join(printed.split()) for case in CASES)
    assert max(map(len, printed.splitlines())) <= 60


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--case", "empty.block"], 3, f"{len(CASES) - 1} not run"),
        (["--", "--collect-only"], 3, ""),
        (["--", "-k", "no_such_word"], 3, "INCOMPLETE (nothing ran)"),
        (
            ["--case", "empty.block", "--mutant", "empty_lse_plus_inf"],
            1,
            "FAILED EMPTY",
        ),
    ],
    ids=["one case", "collect only", "nothing selected", "mutant"],
)
def test_what_is_less_than_the_whole_is_no_conformance(
    monkeypatch, capfd, arguments, code, words
):
    assert _main(monkeypatch, "run", "reference", *arguments) == code
    assert words in capfd.readouterr().out


def test_deselection_from_the_environment_is_incomplete_and_named(
    monkeypatch, capfd, tmp_path
):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k empty.block")
    arguments = ("run", "reference", "--quick", "--report", str(tmp_path))
    assert _main(monkeypatch, *arguments) == 3
    printed = capfd.readouterr().out
    assert "verdict: INCOMPLETE" in printed
    assert "not run: backend.import_is_light, " in printed
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert "mask.causal.tail_aligned" in report["not_run"]
