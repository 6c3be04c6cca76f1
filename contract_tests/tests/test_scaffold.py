"""`new`: what it writes keeps the contract as it stands, and it overwrites nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_decode_contract import cli
from mla_decode_contract.scaffold import write
from mla_decode_contract.scaffold.names import LONGEST, Names
from mla_decode_contract.scaffold.problem import ScaffoldProblem
from mla_decode_contract.scaffold.write import FILES, scaffold

KIT = (sys.executable, "-m", "mla_decode_contract.cli")


def _run(*command, **kwargs):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, **kwargs
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A new adapter, made by the command."""
    directory = tmp_path_factory.mktemp("made") / "toy"
    done = _run(*KIT, "new", "toy-mla", str(directory), "--arch", "gfx942")
    assert done.returncode == 0, done.stderr
    assert f"{directory}/src/toy_mla/backend.py" in done.stdout
    assert "mla-decode-contract run toy-mla" in done.stdout
    return directory


@pytest.fixture(scope="module")
def installed(made, tmp_path_factory):
    """An environment that has it, built from its own pyproject without network."""
    target = tmp_path_factory.mktemp("target")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index")
    offline = ("--no-build-isolation", "--target", str(target), str(made))
    done = _run(*pip, *offline)
    assert done.returncode == 0, done.stderr
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(target), *([known] if known else [])])
    return {**os.environ, "PYTHONPATH": path}


def test_as_generated_it_is_conformant(installed, tmp_path):
    done = _run(
        *(*KIT, "run", "toy-mla", "--assume-arch", "gfx942"),
        *("--report", str(tmp_path / "report")),
        env=installed,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text("utf-8"))
    assert report["verdict"] == "conformant (simulated)"
    assert report["adapter"]["distribution"] == "toy-mla"
    assert report["counts"]["passed"] > 100


def test_its_own_tests_pass(installed, made):
    pytest_ = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    done = _run(*pytest_, "tests/test_backend.py", env=installed, cwd=made)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "a letter first"),
        ("My_MLA", "Try 'my_mla'"),
        ("9lives", "Try 'mla_9lives'"),
        ("_hidden", "Try 'hidden'"),
        ("twice__under", "Try 'twice_under'"),
        ("trailing-", "Try 'trailing'"),
        ("a.b", "Try 'a_b'"),
        ("naïve", "lower-case letters"),
        ("../escape", "Try 'escape'"),
        ("x" * (LONGEST + 1), "at most 40 characters"),
        ("class", "a word of Python's own"),
        ("json", "a word of Python's own"),
        ("auto", "selection reserves"),
        ("reference", "a backend that is installed here"),
        ("torch", "a module that is installed here"),
        ("mla-decode", "a module that is installed here"),
    ],
)
def test_refuses_a_name_that_would_not_work(name, says, tmp_path):
    with pytest.raises(ScaffoldProblem, match=r"got: .+; allowed: .+") as refused:
        scaffold(name, tmp_path / "new", arch="sm_90")
    assert says in str(refused.value)
    assert not (tmp_path / "new").exists()


def test_a_name_has_three_forms():
    names = Names.parse("my_own-mla2")
    assert (names.backend, names.distribution, names.module) == (
        "my_own-mla2",
        "my-own-mla2",
        "my_own_mla2",
    )


@pytest.mark.parametrize(
    ("arch", "says"), [("h100", "no known form"), ("cpu", "for an accelerator")]
)
def test_refuses_an_architecture_without_kernels(arch, says, tmp_path):
    with pytest.raises(ScaffoldProblem, match=says):
        scaffold("toy_mla", tmp_path / "new", arch=arch)


def test_refuses_a_directory_that_holds_anything(tmp_path):
    (tmp_path / ".hidden").write_text("mine", encoding="utf-8")
    with pytest.raises(ScaffoldProblem, match="nothing is ever overwritten"):
        scaffold("toy_mla", tmp_path, arch="sm_90")
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]


def test_refuses_a_file_in_place_of_the_directory(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine", encoding="utf-8")
    with pytest.raises(ScaffoldProblem, match="a file"):
        scaffold("toy_mla", taken, arch="sm_90")
    with pytest.raises(ScaffoldProblem, match="cannot be written"):
        scaffold("toy_mla", taken / "below", arch="sm_90")
    assert taken.read_text(encoding="utf-8") == "mine"


def test_takes_an_empty_directory_and_writes_every_file(tmp_path):
    written = scaffold("toy_mla", tmp_path, arch="sm_90")
    found = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert set(written) == found
    assert len(written) == len(FILES)
    left = [path for path in found if "{{" in path.read_text("utf-8")]
    assert [path.name for path in left] == ["contract.yml"]  # GitHub's own braces


def test_every_template_is_written_somewhere():
    folder = Path(write.__file__).with_name("template")
    assert {f"{name}.jinja" for name in FILES} == {p.name for p in folder.iterdir()}


def test_the_command_refuses_with_status_4(monkeypatch, capsys, tmp_path):
    directory = str(tmp_path / "new")
    monkeypatch.setattr(sys, "argv", ["mla-decode-contract", "new", "No!", directory])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 4
    assert "ERROR: 'No!' names no adapter" in capsys.readouterr().err
