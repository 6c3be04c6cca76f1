import os
from pathlib import Path

import pytest
import torch

from mla_decode.device import DeviceInfo
from mla_decode.reference import ReferenceBackend
from mla_decode_contract.target import Target

pytest_plugins = ["pytester"]

BACKENDS = Path(__file__).with_name("backends")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def reference():
    return ReferenceBackend()


@pytest.fixture
def target():
    return Target(backend="reference", device=DeviceInfo.assume("cpu"))


@pytest.fixture
def _importable_backends(monkeypatch):
    """Workers, too, can import the misbehaving backends."""
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(BACKENDS), *([known] if known else [])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(BACKENDS))
