"""The same answers under every flag of Python, every hash seed, and after a fork."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SCENE = Path(__file__).with_name("runtime_scene.py")
FLAGS = {
    "plain": (),
    "optimised": ("-O", "-W", "error"),
    "no-docstrings": ("-OO",),
    "dev": ("-X", "dev", "-W", "error"),
}
flags = pytest.mark.parametrize("flags", FLAGS)


@cache
def answer(what, flags="plain", seed="random"):
    """What a child says; any word on its standard error is a failure."""
    done = subprocess.run(
        [sys.executable, *FLAGS[flags], str(SCENE), what],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@flags
def test_core_imports_and_refuses_alike_under_every_flag(flags):
    """No refusal is an assertion, which `-O` would drop."""
    assert answer("import_light", flags)[-1] == "BackendRefused"
    assert answer("import_light", flags) == answer("import_light")


def test_plans_and_the_order_of_selection_hang_on_no_hash_seed():
    said = answer("plans", seed="0")
    assert answer("plans", seed="4242") == said
    assert {plan[0] for _, _, plan, _, _ in said if plan} >= {"reference"}
    assert any(refused for _, _, _, refused, _ in said)


def test_all_imports_without_a_warning_and_a_forked_process_decodes_alike():
    assert len(answer("decode", "dev")) == 64


@pytest.mark.slow
@flags
def test_every_module_imports_under_every_flag(flags):
    found = answer("import_all", flags)
    assert "mla_decode.lowering.planner" in found
    assert found == answer("import_all")


@pytest.mark.slow
@flags
def test_bits_hang_on_no_flag(flags):
    assert answer("decode", flags) == answer("decode", "dev")
