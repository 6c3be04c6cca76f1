"""What the doctor is told of FlashMLA: every wrong state apart."""

import importlib
import sys

import pytest

from mla_decode import DeviceInfo
from mla_decode.diagnosis import Diagnoses, Level
from mla_decode_cuda_flashmla import backend
from mla_decode_cuda_flashmla import library as library_module

HOPPER = DeviceInfo(vendor="cuda", arch="sm_90")
CPU = DeviceInfo.assume("cpu")


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
