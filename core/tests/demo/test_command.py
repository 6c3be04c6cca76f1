from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from mla_decode.demo import run as run_module
from mla_decode.demo.command import demo
from mla_decode.demo.measure import Divergence
from mla_decode.demo.render import bar, render
from mla_decode.demo.run import PROMPT_LEN, DemoOptions, run_demo
from mla_decode.demo.weights import load_weights
from mla_decode.errors import ArgumentError

KEYS = {
    "greedy_identical": bool,
    "accepted_per_block": float,
    "accepted_per_block_causal_mask": float,
    "tokens_per_target_pass": float,
    "backend": str,
    "calls": dict,
}


@pytest.fixture(scope="module")
def report():
    return run_demo(DemoOptions(prompts=4, tokens=24, batch=3, device="cpu"))


@pytest.fixture
def cli(monkeypatch, report):
    """The command over a finished run: its options, and how to invoke it."""
    asked = []

    def finished(options, *, progress):
        asked.append(options)
        progress(1.0)
        return report

    monkeypatch.setattr(run_module, "run_demo", finished)
    app = typer.Typer()
    app.command()(demo)
    return lambda *args: (CliRunner().invoke(app, args), asked)


def test_a_run_reports_what_it_was_asked_for(report):
    data = report.as_dict()
    assert {name: type(data[name]) for name in KEYS} == KEYS
    assert (data["prompts"], data["tokens"], data["draft_len"]) == (4, 96, 6)
    assert data["greedy_identical"] is True
    assert data["backend"] == "reference"
    assert data["calls"]["non_causal"] > 0
    assert data["calls"]["causal"] > data["calls"]["non_causal"]
    by_run = {item["run"] for item in data["attention_calls"]}
    assert by_run == {"plain", "speculative", "causal_mask"}
    assert sum(data["accepted_by_position"]) == pytest.approx(
        data["accepted_per_block"]
    )
    assert len(data["samples"]) == 4


def test_the_help_says_how_many_tokens_there_may_be(cli):
    (target, _, _) = load_weights()
    most = target.shape.max_model_len - PROMPT_LEN - target.shape.block_len
    result, _ = cli("--help")
    assert f"at most {most}." in " ".join(result.output.split())


@pytest.mark.parametrize(
    "wrong", [{"prompts": 0}, {"tokens": 400}, {"draft_len": 7}, {"batch": 0}]
)
def test_a_size_that_the_model_does_not_have_is_refused(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        run_demo(DemoOptions(**wrong, device="cpu"))


def test_json_is_all_that_stdout_holds(cli):
    result, asked = cli("--json", "--prompts", "4", "--backend", "reference")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["prompts"] == 4
    assert asked[0].backend == "reference"


def test_people_see_text_figures_and_calls_in_80_columns(cli):
    result, _ = cli()
    assert result.exit_code == 0
    shown = re.sub(r"\s+", " ", result.stdout)
    assert "greedy text identical │ yes" in shown
    assert "with and without speculation" in shown
    assert "Acceptance by position" in shown
    assert "draft non_causal 7 reference" in shown
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_picture_is_written_where_asked(cli, tmp_path):
    picture = tmp_path / "demo.svg"
    result, _ = cli("--plot", str(picture))
    assert result.exit_code == 0
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_a_picture_that_could_not_be_written_is_said_first(cli, tmp_path):
    result, _ = cli("--plot", str(tmp_path / "absent" / "demo.svg"))
    assert (result.exit_code, result.stdout) == (4, "")
    assert "cannot be written there" in result.stderr


def test_errors_leave_through_the_shared_exit_codes(cli, monkeypatch):
    monkeypatch.setattr(run_module, "run_demo", run_demo)
    result, _ = cli("--tokens", "400")
    assert result.exit_code == 4
    assert "tokens = 400" in result.stderr
    result, _ = cli("--prompts", "4000")
    assert result.exit_code == 1
    assert "held-out topics are too short" in result.stderr


def test_texts_that_differ_fail_loudly(cli, report, monkeypatch):
    sample = replace(report.samples[0], speculative="other")
    kind = replace(report.call_kinds[0][1], lowering="fold")
    parted = replace(
        report,
        greedy_identical=False,
        divergences=(Divergence(prompt=0, position=5, margin=0.25),),
        samples=(sample,),
        call_kinds=(("plain", kind),),
    )
    monkeypatch.setattr(run_module, "run_demo", lambda *_, **__: parted)
    result, _ = cli()
    assert result.exit_code == 1
    assert "parts at token 5" in result.stdout
    assert "reference (fold)" in result.stdout
    assert "other" in result.stdout


def test_bars_are_drawn_in_eighths():
    assert bar(1.0, cells=4) == "████"
    assert bar(0.0, cells=4) == ""
    assert bar(0.53125, cells=4) == "██▏"


def test_a_pipe_gets_no_colour(report, capsys):
    render(report, Console())
    assert "\x1b" not in capsys.readouterr().out
