"""The plugin: silent in other people's projects, strict where it is asked for."""

import json
import os
import subprocess
import sys

import pytest

HOSTILE_INI = """
[pytest]
addopts = -x --import-mode=prepend
python_files = spec_*.py
python_functions = should_*
python_classes = Describe
filterwarnings = error
xfail_strict = true
"""


def _pytest(directory, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_an_unrelated_project_does_not_notice_it(tmp_path):
    (tmp_path / "pytest.ini").write_text(HOSTILE_INI)
    (tmp_path / "suite.py").write_text("'''A module of the same name as ours.'''")
    (tmp_path / "spec_it.py").write_text(
        "import sys\n"
        "def should_be_light():\n"
        "    assert not {'torch', 'mla_decode'} & set(sys.modules)\n"
    )
    done = _pytest(tmp_path, "-q", "suite.py", "spec_it.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "contract" not in done.stdout


def test_the_suite_without_a_backend_is_a_usage_error(tmp_path):
    done = _pytest(tmp_path, "-q", "--pyargs", "mla_decode_contract.suite")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "needs --mla-backend" in done.stdout + done.stderr


def test_an_unknown_backend_is_a_usage_error(tmp_path):
    done = _pytest(tmp_path, "--mla-backend", "nobody")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no backend is named 'nobody'" in done.stderr


def test_a_shard_that_is_none_is_a_usage_error(tmp_path):
    done = _pytest(tmp_path, "--mla-backend", "reference", "--mla-shard", "3/2")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "'3/2' names no part of a whole" in done.stderr


def test_the_plugin_runs_a_shard_and_its_report_says_so(tmp_path):
    arguments = ("--mla-backend", "reference", "--mla-quick", "--mla-report", "out")
    suite = ("--pyargs", "mla_decode_contract.suite")
    done = _pytest(tmp_path, *arguments, "--mla-shard", "2/9", *suite)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "verdict: INCOMPLETE (reference, quick, shard 2/9, which held)" in (
        done.stdout
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["shard"] == {"index": 2, "count": 9}
    assert 0 < len(report["cases"]) < 8
    assert report["not_run"] == []


def test_the_suite_runs_in_a_project_of_another_taste(tmp_path):
    (tmp_path / "pytest.ini").write_text(HOSTILE_INI)
    (tmp_path / "spec_it.py").write_text("def should_pass(): pass\n")
    done = _pytest(
        tmp_path,
        "spec_it.py",
        "--mla-backend",
        "reference",
        "--mla-quick",
        "--mla-report",
        "out",
        "--pyargs",
        "mla_decode_contract.suite",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: conformant (reference, quick)" in done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["counts"]["passed"] + report["counts"]["refused"] == len(
        report["cases"]
    )
    assert (tmp_path / "out" / "junit.xml").is_file()


def test_a_backend_whose_suite_was_not_asked_for_is_incomplete(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    done = _pytest(tmp_path, "-q", "test_it.py", "--mla-backend", "reference")
    assert done.returncode == 3
    assert "verdict: INCOMPLETE (nothing ran)" in done.stdout
