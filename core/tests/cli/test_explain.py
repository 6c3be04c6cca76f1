"""`mla-decode explain` and `coverage`, run as a user runs them."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from mla_decode import (
    BackendBase,
    Candidate,
    Capability,
    CliOption,
    DeviceInfo,
    OutdatedLibraryError,
    Refusal,
    RefusalCode,
)
from mla_decode.cli import app as cli_app
from mla_decode.cli import coverage as coverage_module
from mla_decode.cli import explain as explain_module
from mla_decode.reference import ReferenceBackend

GRID = 9 * 15 * 3


def run(capsys, monkeypatch, *arguments, columns="80"):
    """Run the command line in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["mla-decode", *arguments])
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as stopped:
        cli_app.main()
    printed = capsys.readouterr()
    return stopped.value.code or 0, printed.out, printed.err


class Outdated(BackendBase):
    """Served by a newer release of its library only."""

    name = "rocm_aiter"
    capability = Capability(rows=())
    builder_cls = None

    def cost(self, problem, device):
        raise AssertionError(problem, device)

    def evidence(self, device):
        raise AssertionError(device)

    def _forward(self, call):
        raise AssertionError(call)

    def supports_non_causal(self, device):
        raise OutdatedLibraryError(
            "No causal parameter",
            library="amd-aiter",
            installed=device.libraries.get("amd-aiter", "0.1.16"),
            first_supported="0.1.20",
        )


def named(release):
    return CliOption(
        name="--aiter-release",
        help="A release",
        default=None,
        apply=lambda device, value: DeviceInfo.assume(
            device.arch, libraries={release: value}
        ),
    )


@pytest.fixture
def candidates(monkeypatch):
    """Replace what is installed, for every command."""

    def use(*backends):
        found = {b.name: Candidate(name=b.name, backend=b) for b in backends}

        def survey(problem, device, backend=None, lowering="refuse", **_):
            return original(problem, device, backend, lowering, candidates=found)

        original = explain_module.survey
        monkeypatch.setattr(explain_module, "survey", survey)
        monkeypatch.setattr(coverage_module, "survey", survey)

    return use


def test_json_has_the_documented_keys(capsys, monkeypatch):
    code, out, _ = run(
        capsys, monkeypatch, "explain", "--arch", "cpu", "--query-len", "6",
        "--non-causal", "--json",
    )  # fmt: skip
    answer = json.loads(out)
    assert code == 0
    assert set(answer) == {"problem", "device", "selected", "refused"}
    assert answer["device"]["arch"] == "cpu"
    assert answer["device"]["assumed"] is False
    assert answer["selected"]["backend"] == "reference"
    assert answer["selected"]["evidence"] == "reference"
    assert answer["selected"]["notes"] == []
    assert {"kind", "kv_walks", "pad_rows"} <= set(answer["selected"]["lowering"])
    assert answer["problem"]["masks"] == ["non_causal"]
    assert answer["problem"]["query_lens"] == [6]


def test_nobody_accepts_exits_1_with_every_reason(capsys, monkeypatch, candidates):
    candidates(ReferenceBackend())
    code, out, _ = run(
        capsys, monkeypatch, "explain", "--arch", "cpu", "--graphs", "--json"
    )
    (refused,) = json.loads(out)["refused"]
    assert code == 1
    assert json.loads(out)["selected"] is None
    assert set(refused["refusals"][0]) == {"code", "message", "got", "allowed", "fix"}
    assert refused["refusals"][0]["code"] == "feature"


@pytest.mark.parametrize(
    ("options", "query_len"),
    [
        ([], 1),
        (["--non-causal"], 8),
        (["--non-causal", "--query-len", "1"], 1),
        (["--non-causal", "--max-model-len", "5"], 5),
    ],
)
def test_a_draft_block_has_several_tokens_unless_told(
    capsys, monkeypatch, candidates, options, query_len
):
    candidates(ReferenceBackend())
    arguments = ["explain", "--arch", "cpu", "--json", *options]
    code, out, _ = run(capsys, monkeypatch, *arguments)
    assert code == 0
    assert json.loads(out)["problem"]["query_lens"] == [query_len]


def test_an_outdated_library_is_shown_as_version_and_nothing_is_selected(
    capsys, monkeypatch, candidates
):
    candidates(Outdated(), ReferenceBackend())
    code, out, _ = run(
        capsys, monkeypatch, "explain", "--arch", "gfx950", "--non-causal",
        "--query-len", "4", "--json",
    )  # fmt: skip
    answer = json.loads(out)
    assert code == 1
    assert answer["selected"] is None
    codes = [r["code"] for r in answer["refused"][-1]["refusals"]]
    assert "version" in codes
    assert "upgrade amd-aiter to 0.1.20" in out


def test_a_version_refusal_is_not_said_twice():
    reason = Refusal(
        code=RefusalCode.VERSION, message="old", got="1", allowed="2", fix="upgrade"
    )
    error = OutdatedLibraryError(
        "old", library="amd-aiter", installed="1", first_supported="2"
    )
    found = explain_module.Survey(
        selection=None, refused={"rocm_aiter": (reason,)}, outdated=error
    )
    assert explain_module.reasons(found) == {"rocm_aiter": (reason,)}


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "--arch", "nonsense"),
        ("explain", "--num-heads", "0"),
        ("explain", "--no-such-option"),
        ("explain", "--arch", "cpu", "--backend", "nobody"),
        ("coverage", "--arch", "nonsense"),
        ("coverage", "--dtype", "bf16"),
        ("no-such-command",),
    ],
)
def test_usage_errors_exit_4_and_say_what_to_do(capsys, monkeypatch, arguments):
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 4
    assert not out
    assert err.strip()


def test_the_tree_names_the_reasons_the_fix_and_what_a_lowering_would_do(
    capsys, monkeypatch, candidates, narrow_backend
):
    candidates(narrow_backend)
    code, out, _ = run(
        capsys, monkeypatch, "explain", "--arch", "cpu", "--num-heads", "4",
        "--query-len", "4", "--non-causal", "--backend", "narrow",
    )  # fmt: skip
    assert code == 1
    assert "refused narrow" in out
    assert "fix:" in out
    assert "nobody serves this problem" in out
    assert "with --lowering exact: narrow (fold, 1 KV walk(s) a call)" in out
    assert "\x1b[" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_tree_shows_pad_rows(capsys, monkeypatch, candidates, narrow_backend):
    candidates(narrow_backend)
    code, out, _ = run(
        capsys, monkeypatch, "explain", "--arch", "cpu", "--num-heads", "3",
        "--query-len", "5", "--non-causal", "--backend", "narrow", "--lowering",
        "exact",
    )  # fmt: skip
    assert code == 0
    assert "chosen narrow (pad, 1 KV walk(s) a call)" in out
    assert "1 pad row(s) a request" in out


def test_a_backend_may_say_of_each_problem_that_it_serves_how_it_does(
    capsys, monkeypatch, candidates, narrow_backend
):
    class Noting(type(narrow_backend)):
        def notes(self, problem, device):
            yield f"[{device.arch}] {problem.num_q_heads} x {problem.max_query_len}"
            yield "one kernel"

    candidates(Noting())
    asked = ("explain", "--arch", "cpu", "--num-heads", "4", "--backend", "narrow")
    code, out, _ = run(capsys, monkeypatch, *asked)
    assert code == 0
    assert "[cpu] 4 x 1" in out
    assert "one kernel" in out
    lowered = (
        *(*asked, "--query-len", "4", "--non-causal"),
        *("--lowering", "exact", "--json"),
    )
    _, out, _ = run(capsys, monkeypatch, *lowered)
    selected = json.loads(out)["selected"]
    assert selected["lowering"]["kind"] == "fold"
    assert selected["notes"] == ["[cpu] 16 x 1", "one kernel"]


@pytest.fixture
def narrow_backend():
    from dataclasses import replace

    from mla_decode import Mask

    row = ReferenceBackend.capability.row("cpu")

    class Narrow(ReferenceBackend):
        name = "narrow"
        capability = Capability(
            rows=(
                replace(
                    row,
                    num_q_heads=frozenset({3, 4, 16}),
                    query_lens={Mask.CAUSAL: range(1, 2)},
                ),
            )
        )

    return Narrow()


def test_coverage_counts_every_cell_once(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "coverage", "--arch", "cpu", "--json")
    answer = json.loads(out)
    assert code == 0
    assert set(answer["summary"]) == {"native", "fold", "pad", "split", "refused"}
    assert sum(answer["summary"].values()) == len(answer["cells"]) == GRID
    assert answer["summary"]["native"] == GRID
    assert answer["cells"][0] == {
        "num_heads": 8,
        "query_len": 2,
        "dtype": "bf16",
        "kv_dtype": "bf16",
        "outcome": "native",
        "kv_walks": 1,
    }


def test_coverage_tables_mark_each_cell_by_its_rewrite_and_walks(
    capsys, monkeypatch, candidates, narrow_backend
):
    candidates(narrow_backend)
    code, out, _ = run(
        capsys, monkeypatch, "coverage", "--arch", "cpu", "--backend", "narrow",
        "--lowering", "exact",
    )  # fmt: skip
    assert code == 0
    assert "f1" in out
    assert f"of {GRID}" in out


def test_coverage_is_whole_at_60_columns_and_its_titles_in_a_pipe(capsys, monkeypatch):
    asked = ("coverage", "--arch", "cpu", "--backend", "reference")
    _, out, _ = run(capsys, monkeypatch, *asked, columns="60")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 60
    heads = " ".join(f"H{n}" for n in (8, 12, 16, 24, 32, 48, 64, 96, 128))
    assert lines.count(f" Q {heads}") == 3
    assert [line.split()[0] for line in lines if line.endswith(" n1")] == 3 * [
        str(n) for n in range(2, 17)
    ]
    _, out, _ = run(capsys, monkeypatch, *asked, columns=None)
    assert "query, bf16 cache; KV walks a call\n" in out


@pytest.mark.parametrize("lowering", ["refuse", "exact"])
def test_the_tree_promises_no_lowering_where_there_is_none(
    capsys, monkeypatch, candidates, lowering
):
    class Nothing(ReferenceBackend):
        name = "nothing"
        capability = Capability(rows=())

    candidates(Nothing())
    code, out, _ = run(
        capsys, monkeypatch, "explain", "--arch", "cpu", "--query-len", "4",
        "--backend", "nothing", "--lowering", lowering,
    )  # fmt: skip
    assert code == 1
    assert "nobody serves this problem" in out
    assert "with --lowering exact" not in out


def test_coverage_exits_1_where_nothing_is_served(capsys, monkeypatch, candidates):
    candidates(Outdated(), ReferenceBackend())
    code, out, _ = run(
        capsys, monkeypatch, "coverage", "--arch", "gfx950", "--backend", "rocm_aiter"
    )
    assert code == 1
    assert f"{GRID} refused, of {GRID}" in out


def test_adapters_add_options_that_reach_the_device(capsys, monkeypatch):
    from mla_decode.cli import adapter_options

    backend = ReferenceBackend()
    backend.cli_options = (named("amd-aiter"),)
    found = {"reference": Candidate(name="reference", backend=backend)}
    monkeypatch.setattr(adapter_options, "discover", lambda: found)
    code, out, _ = run(
        capsys, monkeypatch, "explain", "--arch", "cpu", "--json",
        "--aiter-release", "0.1.20",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["device"]["libraries"] == {"amd-aiter": "0.1.20"}


class Optional(ReferenceBackend):
    """A backend with a release to assume, which auto does not reach."""

    name = "optional"

    def __init__(self, default=None):
        self.cli_options = (dataclasses.replace(named("amd-aiter"), default=default),)


@pytest.fixture
def optional(monkeypatch, candidates):
    """Install the reference and a backend whose option has this default."""
    from mla_decode.cli import adapter_options

    def use(default=None):
        both = (ReferenceBackend(), Optional(default))
        candidates(*both)
        found = {b.name: Candidate(name=b.name, backend=b) for b in both}
        monkeypatch.setattr(adapter_options, "discover", lambda: found)

    return use


@pytest.mark.parametrize(
    ("command", "options", "warns"),
    [
        ("explain", ["--aiter-release", "1999.1"], True),
        ("explain", ["--aiter-release", "1999.1", "--backend", "optional"], False),
        ("explain", [], False),
        ("coverage", ["--aiter-release", "1999.1"], True),
        ("coverage", ["--aiter-release", "1999.1", "--backend", "optional"], False),
    ],
)
def test_a_release_that_nobody_asks_for_is_said_on_stderr(
    capsys, monkeypatch, optional, command, options, warns
):
    optional()
    code, out, err = run(capsys, monkeypatch, command, "--arch", "cpu", *options)
    assert code == 0
    assert "warning" not in out
    assert ("--aiter-release 1999.1 changes nothing: optional was not" in err) == warns
    assert bool(err) == warns


def test_a_default_release_is_assumed_shown_and_no_reason_to_warn(
    capsys, monkeypatch, optional
):
    optional("0.1.16")
    asked = ("explain", "--arch", "cpu", "--json")
    _, out, err = run(capsys, monkeypatch, *asked)
    assert json.loads(out)["device"]["libraries"] == {"amd-aiter": "0.1.16"}
    assert err == ""
    _, out, _ = run(capsys, monkeypatch, "explain", "--help")
    assert "0.1.16" in out


@pytest.mark.parametrize(
    ("command", "whole"),
    [
        ((), "Say who would decode a problem, who refused and why."),
        (("explain",), "--max-model-len <int range>"),
        (
            ("bench",),
            "time over one row a token, divided by the block's. With --trace,",
        ),
    ],
)
def test_help_is_whole_at_60_columns(capsys, monkeypatch, command, whole):
    code, out, _ = run(capsys, monkeypatch, *command, "--help", columns="60")
    assert code == 0
    assert whole in " ".join(out.split())
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    assert max(map(len, out.splitlines())) <= 60


def test_fp32_is_the_references_from_the_query_to_the_output(capsys, monkeypatch):
    words = ("--dtype", "fp32", "--kv-dtype", "fp32", "--json")
    code, out, _ = run(capsys, monkeypatch, "explain", "--arch", "cpu", *words)
    problem = json.loads(out)["problem"]
    assert code == 0
    assert json.loads(out)["selected"]["backend"] == "reference"
    found = [problem[name] for name in ("q_dtype", "kv_dtype", "out_dtype")]
    assert found == ["fp32"] * 3


def test_version_prints_the_contract(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "--version")
    assert code == 0
    assert "contract 1.0" in out


def test_the_installed_script_runs():
    script = os.path.join(os.path.dirname(sys.executable), "mla-decode")  # noqa: PTH118, PTH120 - a script beside the interpreter
    done = subprocess.run(
        [script, "explain", "--arch", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    assert "chosen reference" in done.stdout
