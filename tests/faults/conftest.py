"""Reported faults by the marker ``fault``: each id becomes a part of the node's name."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from mla_decode_cuda_flashmla.library import look_up

sys.path.insert(0, str(Path(__file__).parent))  # helpers are importable by name


def _catalogue():
    path = Path(__file__).parents[2] / "tools" / "faults.py"
    spec = importlib.util.spec_from_file_location("faults", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


CATALOGUE = _catalogue()
KNOWN = CATALOGUE.load()


def pytest_generate_tests(metafunc):
    marks = list(metafunc.definition.iter_markers("fault"))
    ids = [fault for mark in marks for fault in mark.args]
    unknown = [fault for fault in ids if fault not in KNOWN]
    if unknown or (marks and not ids):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: {unknown or 'no id'}: "
            "name entries of tests/faults/catalogue"
        )
    if ids:
        metafunc.parametrize("fault_id", ids, indirect=True)


@pytest.fixture(autouse=True)
def fault_id(request):
    """The id of the fault that this run of the test meets; None without the marker."""
    return getattr(request, "param", None)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Steps are tiny: threads that wait for one another cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forget_libraries():
    """No kernel library is imported before the test, and none that it wrote after it."""
    roots = ("aiter", "flash_mla")
    names = [name for name in sys.modules if name.partition(".")[0] in roots]
    before = {name: sys.modules.pop(name) for name in names}
    look_up.cache_clear()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
        del sys.modules[name]
    sys.modules.update(before)
    look_up.cache_clear()


@pytest.fixture(scope="session")
def catalogue():
    """``tools/faults.py``."""
    return CATALOGUE
