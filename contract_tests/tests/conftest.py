import os
from pathlib import Path

import pytest
import torch

from mla_decode.device import DeviceInfo
from mla_decode.reference import ReferenceBackend
from mla_decode_contract.outcome import CaseResult, Outcome
from mla_decode_contract.session import Run, Settings
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


@pytest.fixture
def finished():
    """A finished run of the reference: the given results, or a pass for all else."""

    def make(*results, passes=True, **settings):
        run = Run.prepare(Settings(backend="reference", **settings))
        run.evidence = "reference"
        given = {result.case for result in results}
        for case in run.due if passes else ():
            if run.can_run(case) and case.id not in given:
                results += (CaseResult(case=case.id, outcome=Outcome.PASSED),)
        for case in run.due if passes else ():
            if not run.can_run(case):
                result = run.outcome_of(case)
                results += (result,)
        for result in results:
            run.record(result)
        run.finish()
        return run

    return make
