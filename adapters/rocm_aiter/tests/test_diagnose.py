"""What the doctor is told of AITER: every wrong state apart, and how much it weighs."""

import os
import subprocess
import sys

import pytest
import torch
from aiter_install import install_aiter

from mla_decode import DeviceInfo
from mla_decode.diagnosis import Diagnoses, Level
from mla_decode_rocm_aiter import backend

MI300 = DeviceInfo(vendor="rocm", arch="gfx942")
CPU = DeviceInfo.assume("cpu")


def found(device=MI300):
    return [(f.level, f.what, f.got) for f in backend.diagnose(device)]


@pytest.fixture(autouse=True)
def _rocm_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        del sys.modules[name]


def test_the_backend_has_the_hook():
    assert isinstance(backend, Diagnoses)


def test_absence_warns_where_it_is_needed():
    assert [level for level, _, _ in found()] == [Level.WARN]
    assert [level for level, _, _ in found(CPU)] == [Level.OK]


def test_the_other_aiter_is_an_error_everywhere(tmp_path, monkeypatch):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for device in (MI300, CPU):
        ((level, what, _),) = found(device)
        assert level is Level.ERROR
        assert "not AMD's" in what


def test_a_working_directory_and_an_old_release_are_said(tmp_path, monkeypatch):
    install_aiter(tmp_path, monkeypatch, "0.1.16.post6")
    monkeypatch.chdir(tmp_path)
    levels = [level for level, _, _ in found()]
    assert levels == [Level.OK, Level.WARN, Level.WARN]
    assert "aiter" not in sys.modules


def test_a_running_build_is_an_error_where_aiter_decodes(tmp_path, monkeypatch):
    install_aiter(tmp_path, monkeypatch, "0.1.20.post1")
    build = tmp_path / "aiter" / "jit" / "build"
    build.mkdir(parents=True)
    (build / "lock_module_mla").touch()
    assert [level for level, _, _ in found()] == [Level.OK, Level.ERROR]
    assert "lock_module_mla, 0 minutes old" in found()[-1][2]
    os.utime(build / "lock_module_mla", (0, 0))
    assert not found()[-1][2].endswith(" 0 minutes old")


def test_an_unread_release_and_a_failed_import_only_warn_elsewhere(
    tmp_path, monkeypatch
):
    install_aiter(
        tmp_path, monkeypatch, "9.9.9", source="raise ImportError('undefined symbol')"
    )
    levels = [level for level, _, _ in found(CPU)]
    assert levels == [Level.OK, Level.WARN, Level.WARN]
    assert "undefined symbol" in found(CPU)[-1][2]
    assert [level for level, _, _ in found()] == [Level.OK, Level.ERROR]


@pytest.mark.parametrize(
    ("cuda", "word"), [(None, "CPU"), ("13.0", "CUDA")], ids=["cpu", "cuda"]
)
def test_a_torch_of_another_vendor_is_told_beside_an_installed_aiter(
    tmp_path, monkeypatch, cuda, word
):
    install_aiter(tmp_path, monkeypatch, "0.1.20.post1")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for device, level in ((MI300, Level.ERROR), (CPU, Level.WARN)):
        (told,) = (f for f in found(device) if "build of torch" in f[1])
        assert told[0] is level
        assert told[1].endswith(
            f"needs a ROCm build of torch, and this one is a {word} build"
        )


def test_the_index_of_pypi_is_named_by_its_distribution(tmp_path, monkeypatch):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("")
    record(tmp_path, "aiter", "0.1.2")
    monkeypatch.syspath_prepend(str(tmp_path))
    ((level, _, got),) = found()
    assert (level, got) == (Level.ERROR, "distribution aiter 0.1.2")
    assert "uninstall the distribution aiter and install amd-aiter" in [
        f.fix for f in backend.diagnose(MI300)
    ]


def record(site, name, version):
    """Metadata by which an installer says that a distribution owns `aiter`."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    (info / "top_level.txt").write_text("aiter\n")


def test_both_distributions_in_one_folder_are_told(tmp_path, monkeypatch):
    install_aiter(tmp_path, monkeypatch, "0.1.20.post1")
    record(tmp_path, "amd-aiter", "0.1.20.post1")
    record(tmp_path, "aiter", "0.1.2")
    (_, _, got) = next(f for f in found() if "several distributions" in f[1])
    assert got == "aiter 0.1.2, amd-aiter 0.1.20.post1"


def test_a_file_that_stands_before_aiter_is_named_with_what_it_hides(
    tmp_path, monkeypatch
):
    site, here = tmp_path / "site", tmp_path / "here"
    install_aiter(site, monkeypatch, "0.1.20.post1")
    here.mkdir()
    (here / "aiter.py").write_text("")
    monkeypatch.syspath_prepend(str(here))
    level, what, got = found()[0]
    assert level is Level.ERROR
    assert "several modules named aiter" in what
    assert got == f"{here / 'aiter.py'} before {site / 'aiter'}"
    assert "not AMD's" in found()[1][1]


def test_an_arch_without_kernels_is_told_without_importing_aiter(tmp_path, monkeypatch):
    """A consumer card with an AITER that ends the process as soon as it is imported."""
    install_aiter(tmp_path, monkeypatch, "0.1.20.post1", source="import os; os.abort()")
    code = (
        "from mla_decode import DeviceInfo\n"
        "from mla_decode_rocm_aiter import backend\n"
        "from mla_decode import DecodeProblem\n"
        "card = DeviceInfo(vendor='rocm', arch='gfx1100')\n"
        "(reason,) = backend.refusals(DecodeProblem(num_q_heads=16), card)\n"
        "print(reason.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "arch"), done.stderr
