"""A failing case says the one command that repeats it, and the command does."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from mla_decode_contract.session import Run, Settings

SCRIPTS = Path(sys.executable).parent
REPEAT = re.compile(r"^\s*repeat: (.+)$", re.MULTILINE)
FAILED = re.compile(r"^FAILED \S+ \S+: (.+)$", re.MULTILINE)


def _shell(command, directory):
    """What a shell with the kit on its path makes of a line."""
    path = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=directory,
        env={**os.environ, "PATH": path, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(1300)  # four processes that import torch, on a loaded machine
@pytest.mark.usefixtures("_importable_backends")
@pytest.mark.parametrize(
    ("run", "case"),
    [
        ("reference --mutant lse_in_half --seed 3", "lse.natural_log"),
        ("misbehaving:os_exit --assume-arch cpu", "empty.all_requests"),
    ],
    ids=["a wrong value", "an end of the process"],
)
def test_the_printed_command_shows_the_same_failure(tmp_path, run, case):
    code, printed = _shell(
        f"mla-decode-contract run {run} --workers 1 --report out -- -k {case}",
        tmp_path,
    )
    assert code == 1, printed
    (command,) = set(REPEAT.findall(printed))
    assert f"--case {case}" in command
    code, again = _shell(command, tmp_path)
    assert code == 1, again
    assert FAILED.findall(again) == FAILED.findall(printed) != []
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {c["id"]: c["repeat"] for c in report["cases"] if c["repeat"]} == {
        case: command
    }
    junit = ET.parse(tmp_path / "out" / "junit.xml")  # noqa: S314 - the kit wrote it
    (failure,) = junit.iter("failure")
    assert failure.text.endswith(f"repeat: {command}")


def _command(case="empty.block", **settings):
    run = Run.prepare(Settings(backend="reference", **settings))
    return run.command(case)


def test_it_names_backend_arch_case_and_seed():
    words = shlex.split(_command(assume_arch="cpu", seed=7))
    assert words[:3] == ["mla-decode-contract", "run", "reference"]
    assert words[3:7] == ["--assume-arch", "cpu", "--case", "empty.block"]
    assert words[7:] == ["--seed", "7"]


def test_it_names_the_simulated_arch():
    assert "--assume-arch gfx942" in _command(assume_arch="gfx942")


def test_it_names_the_hardware_where_that_was_found():
    run = Run.prepare(Settings(backend="reference"))
    kind = "--assume-arch" if run.target.device.assumed else "--arch"
    assert f" {kind} {run.target.device.arch} " in run.command("empty.block")


def test_it_names_the_release_that_the_environment_simulates(monkeypatch):
    monkeypatch.setenv("MLA_DECODE_SIMULATE", "rocm_aiter:gfx950:0.1.19 x")
    assert _command(assume_arch="gfx950").startswith(
        "MLA_DECODE_SIMULATE='rocm_aiter:gfx950:0.1.19 x' mla-decode-contract run "
    )


def test_it_names_mutant_timeout_and_an_exception_of_the_case(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = tmp_path / "known failures.toml"
    known.write_text('[[tolerance]]\ncase = "lse.natural_log"\nunits = 9\nreason = "r"')
    settings = {
        "mutant": "lse_log2",
        "timeout_s": 7.5,
        "known_failures": known,
        "assume_arch": "cpu",
    }
    named = _command("lse.natural_log", **settings)
    assert named.endswith(
        "--mutant lse_log2 --timeout-s 7.5 --known-failures 'known failures.toml'"
    )
    assert "known" not in _command("empty.block", **settings)
