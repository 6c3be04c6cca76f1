"""What the doctor is told of AITER: every wrong state apart, and how much it weighs."""

import sys

import pytest
from aiter_install import install_aiter

from mla_decode import DeviceInfo
from mla_decode.diagnosis import Diagnoses, Level
from mla_decode_rocm_aiter import backend

MI300 = DeviceInfo(vendor="rocm", arch="gfx942")
CPU = DeviceInfo.assume("cpu")


def found(device=MI300):
    return [(f.level, f.what, f.got) for f in backend.diagnose(device)]


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
    assert "lock_module_mla" in found()[-1][2]


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
