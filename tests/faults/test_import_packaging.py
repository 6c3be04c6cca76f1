"""What stands under a library's name, found without importing it where it may hurt."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_packages import PLANNERS, write_aiter, write_package
from fault_steps import amd, problem_of

from mla_decode import DeviceInfo, discover
from mla_decode.diagnosis import Finding, Level
from mla_decode.diagnosis.backends import with_symptom
from mla_decode.diagnosis.children import ask_child
from mla_decode.diagnosis.machine import Machine
from mla_decode.diagnosis.torch_build import TorchBuild, torch_findings
from mla_decode.selection import survey

MI355 = DeviceInfo(vendor="rocm", arch="gfx950")

pytestmark = pytest.mark.usefixtures("forget_libraries")


def reason_of(name="rocm_aiter", device=MI355):
    """The one reason against a plain problem."""
    (reason,) = survey(problem_of(), device, name).refused[name]
    return reason


def findings():
    return list(discover()["rocm_aiter"].backend.diagnose(MI355))


@pytest.mark.fault("IMPORT-01")
def test_the_other_aiter_is_named_with_its_version(tmp_path, monkeypatch):
    source = {"__init__.py": "raise SystemExit('imported')\n"}
    owner = ("aiter", "0.1.2")
    write_package(tmp_path, monkeypatch, "aiter", source, distribution=owner)
    reason = reason_of()
    assert str(reason.code) == "dependency"
    assert reason.got == "distribution aiter 0.1.2"
    assert "amd-aiter" in reason.allowed
    assert "uninstall the distribution aiter and install amd-aiter" in reason.fix
    (found,) = [f for f in findings() if f.what == reason.message]
    assert (found.level, found.got) == (Level.ERROR, reason.got)


@pytest.mark.fault("IMPORT-01")
def test_a_single_file_of_that_name_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "aiter.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = reason_of()
    assert str(reason.code) == "dependency"
    assert str(tmp_path / "aiter.py") in reason.got


@pytest.mark.fault("IMPORT-01")
def test_a_copy_that_hides_another_is_told_apart(tmp_path, monkeypatch):
    write_aiter(tmp_path / "installed", monkeypatch)
    hiding = write_aiter(tmp_path / "here", monkeypatch)
    (found,) = [f for f in findings() if "several modules named aiter" in f.what]
    assert found.level is Level.ERROR
    assert found.got.startswith(str(hiding))
    assert f"rename or remove {hiding}" in found.fix


SWALLOWING = """
try:
    from aiter import missing_extension
except ImportError as error:
    print(f"aiter: {error}")
"""


@pytest.mark.fault("IMPORT-02")
@pytest.mark.parametrize(
    ("init", "mla", "missing"),
    [
        (SWALLOWING, None, "get_mla_metadata_info_v1, get_mla_metadata_v1"),
        (PLANNERS.replace("info_v1", "v2"), None, "get_mla_metadata_info_v1"),
        (PLANNERS, "x = 1\n", "mla_decode_fwd"),
    ],
)
def test_functions_that_an_import_lost_are_listed(
    init, mla, missing, tmp_path, monkeypatch
):
    words = {} if mla is None else {"mla": mla}
    write_aiter(tmp_path, monkeypatch, init=init, **words)
    reason = reason_of()
    assert str(reason.code) == "import"
    assert missing in reason.got
    assert "first warning" in reason.fix


GLIBCXX = "libstdc++.so.6: version `GLIBCXX_3.4.31' not found"


@pytest.mark.fault("IMPORT-03")
@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (GLIBCXX, "a newer C++ runtime"),
        ("x.so: undefined symbol: _ZN3c10", "another torch"),
        ("libamdhip64.so.7: cannot open shared object file", "another CUDA or ROCm"),
    ],
)
def test_the_loaders_words_are_kept_and_understood(words, cause, tmp_path, monkeypatch):
    write_aiter(tmp_path, monkeypatch, init=f"raise ImportError({words!r})\n")
    reason = reason_of()
    assert str(reason.code) == "import"
    assert words in reason.got
    found = with_symptom(_as_error(reason))
    assert cause in found.what
    assert reason.fix in found.fix
    assert survey(problem_of(), MI355, "triton_mla").selection is not None


def _as_error(reason):
    return Finding(
        level=Level.ERROR, what=reason.message, got=reason.got, fix=reason.fix
    )


BUILDING = """
import os, pathlib
mark = pathlib.Path(__file__).with_name("built")
if not mark.exists():
    raise ModuleNotFoundError("No module named 'aiter.jit.module_x'")
"""


@pytest.mark.fault("IMPORT-04")
def test_a_build_in_progress_is_asked_about_again(tmp_path, monkeypatch):
    package = write_aiter(tmp_path, monkeypatch, init=BUILDING + PLANNERS)
    for _ in range(2):
        reason = reason_of()
        assert str(reason.code) == "feature"
        assert "aiter.jit.module_x" in reason.got
        assert "wait for the build and ask again" in reason.fix
    (package / "built").touch()
    assert survey(problem_of(), MI355, "rocm_aiter").selection is not None


@pytest.mark.fault("IMPORT-05")
def test_a_lock_is_refused_by_its_path_and_its_library_not_imported(
    tmp_path, monkeypatch
):
    package = write_aiter(tmp_path, monkeypatch, init="raise SystemExit('waits')\n")
    build = package / "jit" / "build"
    build.mkdir(parents=True)
    (build / "lock_module_mla_asm").touch()
    reason = reason_of()
    assert str(reason.code) == "feature"
    assert str(build / "lock_module_mla_asm") in reason.got
    assert "delete it" in reason.fix
    (found,) = [f for f in findings() if f.what == reason.message]
    assert found.level is Level.ERROR
    assert str(build) in found.got


@pytest.mark.fault("IMPORT-05")
def test_an_import_without_end_is_ended_and_said():
    waiting = "import time; time.sleep(3600)"
    assert ask_child(waiting, timeout_s=0.5).trouble == "no answer within 0.5 s"


ASK_EVERYBODY = """
import json, sys
import mla_decode
known = mla_decode.discover()
from mla_decode.selection import survey
asked = mla_decode.DecodeProblem(num_q_heads=16)
for arch in ("cpu", "gfx942", "sm_90", "gfx1100"):
    survey(asked, mla_decode.DeviceInfo.assume(arch))
decoder = mla_decode.MLADecoder(asked, device="cpu")
from mla_decode_vllm.plugin import register
register()
roots = {name.partition(".")[0] for name in sys.modules}
print(json.dumps({
    "imported": sorted(roots & {"aiter", "flash_mla", "vllm", "triton"}),
    "backend": decoder.backend.name,
    "broken": [n for n, c in known.items() if c.refusal is not None],
}))
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A process in which every kernel library would end it on import."""
    site = tmp_path_factory.mktemp("site")
    for name in ("aiter", "flash_mla", "vllm"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("import os; os._exit(7)\n")
        (site / name / "mla.py").write_text("import os; os._exit(7)\n")
    plugin = Path(__file__).parents[2] / "engines" / "vllm" / "src"
    path = os.pathsep.join((str(site), str(plugin), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ASK_EVERYBODY],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "MLA_DECODE_VLLM": "off"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.fault("IMPORT-05", "IMPORT-06", "IMPORT-08")
def test_nothing_is_imported_that_was_not_chosen(asked):
    assert asked == {"imported": [], "backend": "reference", "broken": []}


@pytest.mark.fault("IMPORT-06")
@pytest.mark.parametrize("arch", ["gfx1100", "sm_89", "cpu"])
def test_a_card_that_needs_no_library_is_told_so_without_it(
    arch, tmp_path, monkeypatch
):
    write_aiter(tmp_path, monkeypatch, init="raise SystemExit('imported')\n")
    device = DeviceInfo(vendor=DeviceInfo.assume(arch).vendor, arch=arch)
    for name in ("rocm_aiter", "cuda_flashmla"):
        assert str(reason_of(name, device).code) == "arch"
    assert "aiter" not in sys.modules


@pytest.mark.fault("IMPORT-08")
def test_a_named_backend_is_the_only_one_asked(tmp_path, monkeypatch):
    write_aiter(tmp_path, monkeypatch, init="raise SystemExit('imported')\n")
    found = survey(problem_of(), MI355, "triton_mla")
    assert found.selection is not None
    assert found.refused == {}
    assert survey(problem_of(), amd(), "rocm_aiter").selection is not None
    assert "aiter" not in sys.modules


BUILDS = {
    "cuda": TorchBuild(version="2.13.0+cu130", cuda="13.0"),
    "rocm": TorchBuild(version="2.13.0+rocm7.1", hip="7.1"),
    "cpu": TorchBuild(version="2.13.0+cpu"),
}
HOSTS = {
    "rocm": Machine(vendor="rocm", arch="gfx942", source="/sys/class/kfd"),
    "cuda": Machine(vendor="cuda", source="/proc/driver/nvidia/version"),
    "cpu": Machine(vendor="cpu"),
}
WORDS = {"cuda": "CUDA", "rocm": "ROCm", "cpu": "CPU"}


@pytest.mark.fault("IMPORT-09")
@pytest.mark.parametrize(("build", "host"), list(itertools.product(BUILDS, HOSTS)))
def test_a_build_for_another_host_is_said_in_a_sentence(build, host):
    (found, *_) = torch_findings(BUILDS[build], HOSTS[host])
    if host in {build, "cpu"}:
        assert "build on" not in found.what
    else:
        whose = {"rocm": "an AMD host", "cuda": "an NVIDIA host"}[host]
        assert found.what == f"torch is a {WORDS[build]} build on {whose}"
        assert found.level is Level.ERROR
        assert f"torch's {WORDS[host]} build" in found.fix
