"""What the doctor is told of FlashMLA: every wrong state apart."""

import importlib
import importlib.machinery
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mla_decode import DeviceInfo
from mla_decode.diagnosis import Diagnoses, Finding, Level
from mla_decode.diagnosis.backends import with_symptom
from mla_decode_cuda_flashmla import backend
from mla_decode_cuda_flashmla import library as library_module

HOPPER = DeviceInfo(vendor="cuda", arch="sm_90")
CPU = DeviceInfo.assume("cpu")


@pytest.fixture(autouse=True)
def _cuda_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    library_module.look_up.cache_clear()
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    yield
    library_module.look_up.cache_clear()
    sys.modules.pop("flash_mla", None)


def found(device):
    return [(f.level, f.what, f.fix) for f in backend.diagnose(device)]


def package(site, monkeypatch, source):
    (site / "flash_mla").mkdir()
    if source is not None:
        (site / "flash_mla" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()


def test_the_backend_has_the_hook():
    assert isinstance(backend, Diagnoses)


def test_absence_warns_on_hopper_and_names_the_copies():
    note, absent = found(HOPPER)
    assert "2026-09-30" in note[1]
    assert absent[0] is Level.WARN
    assert "tokenspeed-flashmla" in absent[2]
    assert [level for level, _, _ in found(CPU)] == [Level.OK, Level.OK]


def test_a_bare_folder_is_an_error(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, None)
    level, what, fix = found(CPU)[-1]
    assert level is Level.ERROR
    assert "without __init__.py" in what
    assert str(tmp_path) in fix


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('undefined symbol: _Z')", "cannot be imported"),
        (
            (
                "def get_mla_metadata(*a, **k): ...\n"
                "def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, "
                "head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal, "
                "enable_batch_invariant): ...\n"
            ),
            "no dense decode for Hopper",
        ),
    ],
    ids=["abi", "upstream"],
)
def test_what_cannot_be_called_is_an_error_on_hopper(
    tmp_path, monkeypatch, source, words
):
    package(tmp_path, monkeypatch, source)
    assert found(HOPPER)[-1][0] is Level.ERROR
    assert words in found(HOPPER)[-1][1]
    assert found(CPU)[-1][0] is Level.WARN


def test_a_callable_copy_and_two_owners_are_said(tmp_path, monkeypatch):
    source = (
        "def get_mla_metadata(*a, **k): ...\n"
        "def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v,"
        " tile_scheduler_metadata, num_splits, softmax_scale, causal): ...\n"
    )
    package(tmp_path, monkeypatch, source)
    for name in ("sgl_flash_mla", "tokenspeed_flashmla"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        (info / "top_level.txt").write_text("flash_mla\n")
    levels = [level for level, _, _ in found(HOPPER)]
    assert levels == [Level.OK, Level.ERROR, Level.OK]


@pytest.mark.parametrize(
    ("hip", "word"), [(None, "CPU"), ("7.0", "ROCm")], ids=["cpu", "rocm"]
)
def test_a_torch_of_another_vendor_is_told_beside_an_installed_copy(
    tmp_path, monkeypatch, hip, word
):
    package(tmp_path, monkeypatch, "")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", hip)
    (told,) = (f for f in found(HOPPER) if "build of torch" in f[1])
    assert told[0] is Level.ERROR
    assert told[1].endswith(f"this one is a {word} build")


def test_a_source_tree_that_hides_the_installed_copy_is_named(tmp_path, monkeypatch):
    site, tree = tmp_path / "site", tmp_path / "tree"
    for place in (site, tree):
        place.mkdir()
        package(place, monkeypatch, "")
    (level, what, _) = found(HOPPER)[1]
    assert level is Level.ERROR
    assert "several modules named flash_mla" in what
    got = next(f.got for f in backend.diagnose(HOPPER) if "several modules" in f.what)
    assert got == f"{tree / 'flash_mla'} before {site / 'flash_mla'}"


def extension_of_another_build():
    """A true extension module that asks for a symbol which nobody has."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    wanted = b"\0PyObject_GetAttr\0"
    for path in sorted(Path(np.__file__).parent.glob(f"**/*{suffix}")):
        content = path.read_bytes()
        if wanted in content:
            return content.replace(wanted, b"\0PyObject_GetAttz\0"), suffix
    raise LookupError(suffix)


def told(device):
    """The doctor's last finding, with the cause that its words give away."""
    found: Finding = with_symptom(list(backend.diagnose(device))[-1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="issue 11: patches an ELF file")
def test_a_library_of_another_abi_is_told_by_the_linkers_own_words(
    tmp_path, monkeypatch
):
    package(tmp_path, monkeypatch, "import flash_mla.kernels")
    content, suffix = extension_of_another_build()
    (tmp_path / "flash_mla" / f"kernels{suffix}").write_bytes(content)
    finding = told(HOPPER)
    assert finding.level is Level.ERROR
    assert "undefined symbol: PyObject_GetAttz" in finding.got
    assert "ABI mismatch" in finding.what


def test_a_library_for_another_python_is_told_by_its_missing_part(
    tmp_path, monkeypatch
):
    package(tmp_path, monkeypatch, "import flash_mla.cuda")
    (tmp_path / "flash_mla" / "cuda.cpython-39-x86_64-linux-gnu.so").write_bytes(b"")
    assert "for another Python" in told(HOPPER).what


@pytest.mark.skipif(sys.platform != "linux", reason="issue 11: an ELF loader's words")
def test_a_library_for_another_processor_is_told(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, "import flash_mla.cuda")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / "flash_mla" / f"cuda{suffix}").write_bytes(b"MZ" + bytes(200))
    assert "another processor or system" in told(HOPPER).what


def test_a_library_that_wants_torchs_cuda_build_is_told(tmp_path, monkeypatch):
    words = "libc10_cuda.so: cannot open shared object file: No such file or directory"
    package(tmp_path, monkeypatch, f"raise ImportError({words!r})")
    assert "wrong torch build" in told(HOPPER).what
