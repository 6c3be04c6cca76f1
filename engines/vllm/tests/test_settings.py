"""What a user says, and which vLLM is there: neither needs vLLM."""

import logging
import subprocess
import sys
import types

import pytest
from packaging.version import Version

from mla_decode import ArgumentError
from mla_decode_vllm import plugin, releases
from mla_decode_vllm.settings import read_settings


def test_by_default_every_platform_member_is_taken_without_rewrites():
    settings = read_settings({})
    assert (settings.backend, settings.lowering, settings.over) == (
        None,
        "refuse",
        None,
    )
    assert not settings.is_off


def test_reads_every_variable():
    settings = read_settings(
        {
            "MLA_DECODE_VLLM": "triton_mla",
            "MLA_DECODE_VLLM_LOWERING": "exact",
            "MLA_DECODE_VLLM_OVER": "FLASHMLA",
        }
    )
    assert settings.backend == "triton_mla"
    assert (settings.lowering, settings.over) == ("exact", "FLASHMLA")
    assert read_settings({"MLA_DECODE_VLLM": "off"}).is_off


@pytest.mark.parametrize("name", ["MLA_DECODE_VLLM_LOWERING", "MLA_DECODE_VLLM_OVER"])
def test_refuses_a_word_that_a_variable_does_not_take(name):
    with pytest.raises(ArgumentError, match=name):
        read_settings({name: "sometimes"})


@pytest.mark.parametrize(
    ("release", "known"),
    [
        ("0.27.1", False),
        ("0.28.0", True),
        ("0.30.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1.dev5+gabcdef", True),
        ("0.34.0rc1", False),
        ("1.0", False),
    ],
)
def test_knows_the_releases_that_it_was_written_for(release, known):
    assert releases.is_supported(Version(release)) is known


def test_an_unknown_release_is_one_warning_and_nothing_registered(monkeypatch, caplog):
    monkeypatch.delenv("MLA_DECODE_VLLM", raising=False)
    monkeypatch.setattr(plugin, "installed_vllm", lambda: Version("0.99"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)  # touching it would raise
    with caplog.at_level(logging.WARNING, logger="vllm.mla_decode"):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "0.99 is outside" in caplog.text


def test_a_wrong_word_leaves_vllm_alone(monkeypatch, caplog):
    monkeypatch.setenv("MLA_DECODE_VLLM_LOWERING", "sometimes")
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with caplog.at_level(logging.WARNING, logger="vllm.mla_decode"):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        plugin.register()
    assert "stays off" in caplog.text


@pytest.mark.parametrize(
    ("kind", "member"),
    [
        ("rocm", "ROCM_AITER_MLA"),
        ("cuda", "CUSTOM"),
        ("cpu", "CPU_MLA"),
        ("tpu", None),
    ],
)
def test_takes_the_place_of_the_platforms_member(kind, member):
    platform = types.SimpleNamespace(
        **{
            f"is_{name}": (lambda name=name: name == kind)
            for name in ("rocm", "cuda", "cpu")
        }
    )
    assert plugin.platform_member(platform) == member


def test_every_choice_has_a_class():
    assert set(plugin.STANDS_IN) == {
        "CUSTOM",
        "TRITON_MLA",
        "FLASHMLA",
        "ROCM_AITER_MLA",
        "CPU_MLA",
    }


def test_importing_the_plugin_loads_neither_vllm_nor_torch():
    code = (
        "import sys, mla_decode_vllm\n"
        "print(sorted({'vllm', 'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
