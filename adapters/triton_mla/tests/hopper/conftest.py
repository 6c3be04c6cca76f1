"""The work table and the merge, interpreted on the CPU."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers are importable by name

pytest.importorskip("triton", reason="Triton is an optional part of a CPU machine")


def load_interpreted(name):
    import triton

    import mla_decode_triton.hopper as package

    full_name = f"interpreted_hopper_{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    path = Path(package.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(full_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def plan_kernel():
    return load_interpreted("schedule").plan_kernel


@pytest.fixture(scope="session")
def merge_kernel():
    return load_interpreted("merge").merge_kernel
