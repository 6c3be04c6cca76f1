"""What importing costs: no torch where no tensor is involved, no kernels for a name."""

import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points

import pytest

import mla_decode
from mla_decode.discovery import ENTRY_POINT_GROUP

LIGHT = """
import sys
import mla_decode
problem = mla_decode.DecodeProblem(num_q_heads=16, query_lens={1, 4})
device = mla_decode.DeviceInfo.assume("gfx942")
row = mla_decode.CapabilityRow(
    arch="gfx950", dtypes=frozenset(), out_dtypes=frozenset(),
    page_sizes=range(1), num_q_heads=range(1), query_lens={},
)
reasons = mla_decode.Capability(rows=(row,)).refusals(problem, device)
error = mla_decode.BackendRefused("no", {"x": reasons})
assert mla_decode.normalise_causal(False) is False
"""

HEAVY = ("triton", "aiter", "flash_mla", "flash_attn", "flashinfer", "vllm")

LOAD = """
import sys
from importlib.metadata import entry_points
(point,) = entry_points(group={group!r}, name={name!r})
backend = point.load()
assert backend.name == {name!r}
import mla_decode
mla_decode.DeviceInfo.assume("sm_90")
backend.capability.archs
"""


@cache
def modules_after(source):
    """Names in sys.modules after a fresh process ran the source."""
    report = "\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{source}{report}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_core_and_asking_a_capability_imports_no_torch():
    loaded = modules_after(LIGHT)
    assert "mla_decode.capability" in loaded
    assert not {"torch", "triton", "rich", "typer"} & loaded


@pytest.mark.parametrize(
    "name", sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})
)
def test_importing_a_backend_imports_no_kernels(name):
    loaded = modules_after(LOAD.format(group=ENTRY_POINT_GROUP, name=name))
    roots = {module.split(".")[0] for module in loaded}
    assert not set(HEAVY) & roots


def test_the_references_kernel_waits_for_its_first_use():
    loaded = modules_after(LOAD.format(group=ENTRY_POINT_GROUP, name="reference"))
    for late in ("kernel", "builder", "forward", "oracle"):
        assert f"mla_decode.reference.{late}" not in loaded


def test_every_public_name_is_there():
    for name in mla_decode.__all__:
        assert getattr(mla_decode, name) is not None
    assert set(mla_decode._LAZY) <= set(mla_decode.__all__)


def test_a_name_that_does_not_exist_says_so():
    with pytest.raises(AttributeError, match="'mla_decode' has no attribute 'decode'"):
        _ = mla_decode.decode
