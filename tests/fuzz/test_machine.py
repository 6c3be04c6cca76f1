"""An engine that changes its mind and makes mistakes, over every backend of a CPU."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fuzz_run
import pytest
import torch
from fuzz_machine import with_backend
from fuzz_targets import TARGETS
from hypothesis import Phase

from mla_decode.discovery import discover
from mla_decode_contract.mutants import conduct, outputs, state, values
from mla_decode_contract.mutants.mutant import derive, derive_builder

STEPS = {name: 1000 for name in TARGETS if name != "triton_mla-sm_90"}
SLOW_STEPS = dict.fromkeys(STEPS, 20_000) | {"triton_mla-sm_90": 400}
"""An interpreted kernel takes a third of a second: few steps, and none in plain nox."""
LEAST_FRACTION = 0.4
"""Of the steps: those with a forward that was accepted and compared with float64."""


@pytest.fixture
def one_thread():
    """Tensors are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def chosen_seed(request):
    """Of ``--hypothesis-seed``; without it every run is the same."""
    text = request.config.getoption("--hypothesis-seed", None)
    return None if text is None else int(text)


@pytest.mark.parametrize("name", STEPS)
def test_no_step_fails_and_no_mistake_goes_unsaid(
    name, one_thread, chosen_seed, capsys
):
    del one_thread
    tally = fuzz_run.run_machine(TARGETS[name], STEPS[name], chosen_seed=chosen_seed)
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: {tally}\n")
    assert tally.steps >= STEPS[name]
    assert tally.fraction >= LEAST_FRACTION


@pytest.fixture(scope="module")
def running(request):
    """Every target in a child of its own, one a core at a time: a death is a failure."""
    text = request.config.getoption("--hypothesis-seed", None)

    def run(name, steps):
        command = [sys.executable, fuzz_run.__file__, name, f"--steps={steps}"]
        return subprocess.run(
            [*command, *([] if text is None else [f"--seed={text}"])],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=1800,
        )

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        yield {name: pool.submit(run, *one) for name, one in _named(SLOW_STEPS)}


def _named(steps):
    return ((name, (name, count)) for name, count in steps.items())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SLOW_STEPS)
def test_no_step_of_very_many_fails(name, running, capsys):
    done = running[name].result()
    with capsys.disabled():
        sys.stdout.write(f"\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr


# --- the machine finds what it is there for -------------------------------------------


def tables_on_trust(backend):
    """A builder that says ``validate="device"`` and looks at nothing there."""
    right = backend.builder_cls

    def _make(self, common, shape, *, causal):
        asked, self.validate = self.validate, "host"
        metadata = right._make(self, common, shape, causal=causal)
        self.validate = asked
        return metadata

    return derive(backend, builder_cls=derive_builder(right, _make=_make))


DEFECTS = {
    state.stale_metadata_served: "stale metadata was accepted",
    values.mask_ignored: "out is off|lse is off",
    tables_on_trust: "a (batch with|page past).* was accepted",
    state.ubatch_state_on_class: "out is (off|not finite)|a row|lse",
    values.page_tail_read: "not finite",
    conduct.writes_before_checking: "out was touched",
    outputs.empty_lse_zero: "an empty row's lse",
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_is_found(defect, one_thread):
    del one_thread
    target = TARGETS["reference"]
    backend = defect(discover()["reference"].backend)
    with pytest.raises(AssertionError, match=DEFECTS[defect]):
        fuzz_run.run_machine(
            with_backend(target, backend), 1000, phases=[Phase.generate]
        )
