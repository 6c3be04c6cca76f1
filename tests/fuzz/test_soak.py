"""The soak on a CPU: its steps are right, its log is whole, and it goes on where it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def soak(*options):
    """Soak the reference."""
    return subprocess.run(
        [sys.executable, SOAK, "--backend", "reference", "--device", "cpu", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"},
    )


@pytest.mark.slow
def test_two_hundred_steps_of_the_reference_are_right(tmp_path):
    log = tmp_path / "soak.json"
    done = soak("--steps", "200", "--json", str(log))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(log.read_text())
    assert found["steps_done"] == sum(found["kinds"].values()) == 200
    assert set(found["kinds"]) == {"reference eager", "reference ubatches"}
    assert found["checks"] == len(found["memory"]) >= 4
    assert 0 < found["worst"]["reference"]["out"] < 2e-2
    assert found["finished"]
    assert not found["failures"]
    assert not found["refused"]


@pytest.mark.slow
def test_an_interrupted_soak_goes_on_where_it_was(tmp_path):
    log = tmp_path / "soak.json"
    options = ("--steps", "60", "--check-every", "10", "--json", str(log))
    assert soak(*options).returncode == 0
    whole = json.loads(log.read_text())
    cut = {**whole, "steps_done": 30, "finished": False}
    cut["kinds"] = {"reference eager": 30}
    log.write_text(json.dumps(cut))
    assert soak(*options, "--resume").returncode == 0
    found = json.loads(log.read_text())
    assert found["steps_done"] == sum(found["kinds"].values()) == 60
    assert found["finished"]
    other = soak(*options, "--seed", "1", "--resume")
    assert other.returncode == 2
    assert "is the log of" in other.stderr
