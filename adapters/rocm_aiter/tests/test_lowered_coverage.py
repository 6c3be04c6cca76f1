"""Every non-causal block, served by rewrites on every chip and release: executed."""

import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mla_decode import DeviceInfo
from mla_decode.cli.coverage import cells

CELLS = Path(__file__).with_name("lowered_cells.py")
SERVED = {
    ("gfx942", "0.1.20.post1", "plain"): 405,
    ("gfx950", "0.1.20.post1", "plain"): 405,
    ("gfx942", "0.1.16.post6", "plain"): 405,
    ("gfx950", "0.1.16.post6", "plain"): 405,
    ("gfx942", "0.1.20.post1", "lse"): 270,
    ("gfx950", "0.1.20.post1", "lse"): 270,
    ("gfx942", "0.1.16.post6", "lse"): 0,
    ("gfx950", "0.1.16.post6", "lse"): 270,
}
NATIVE = {("gfx950", "0.1.20.post1"): 265}


def coverage(arch, release, lse, lowering):
    """Counts of `mla-decode coverage` by outcome."""
    device = DeviceInfo.assume(arch, libraries={"amd-aiter": release})
    found = cells(device, "rocm_aiter", lowering, needs_lse=lse == "lse")
    return Counter(cell.outcome for cell in found)


@pytest.mark.parametrize(("arch", "release", "lse"), SERVED)
def test_rewrites_serve_what_has_a_kernel_for_one_token_rows(arch, release, lse):
    summary = coverage(arch, release, lse, "exact")
    assert summary.total() == 405
    assert 405 - summary["refused"] == SERVED[arch, release, lse]


@pytest.mark.parametrize("release", ["0.1.20.post1", "0.1.16.post6"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_without_rewrites_only_the_library_s_own_blocks_are_served(arch, release):
    summary = coverage(arch, release, "plain", "refuse")
    native = NATIVE.get((arch, release), 0)
    assert (summary["native"], summary["refused"]) == (native, 405 - native)


def execute(arch, release, lse, step):
    """Decode every step-th cell in one child, whose simulator aborts on a miss."""
    done = subprocess.run(
        [sys.executable, CELLS, arch, release, lse, str(step)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.match(r"(\d+) cells", done.stdout)[1])


@pytest.mark.parametrize(("arch", "release"), [("gfx942", "0.1.20.post1")])
def test_served_cells_decode_to_the_reference_values(arch, release):
    assert execute(arch, release, "plain", 17) == len(range(0, 405, 17))


@pytest.fixture(scope="module")
def executed():
    """Every combination in a child of its own, one a core at a time."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        yield {key: pool.submit(execute, *key, 1) for key in SERVED}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("arch", "release", "lse"), SERVED)
def test_every_served_cell_decodes_to_the_reference_values(
    executed, arch, release, lse
):
    assert executed[arch, release, lse].result() == 405
