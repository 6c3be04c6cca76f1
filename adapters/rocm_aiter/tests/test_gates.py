"""Arch, then signature, then the installed kernel table."""

import importlib
import sys

import pytest
from aiter_install import install_aiter, table_csv
from aiter_steps import device_of, problem_of

from mla_decode import (
    ArgumentError,
    DeviceInfo,
    OutdatedLibraryError,
    RefusalCode,
    discover,
    select,
)
from mla_decode_rocm_aiter import backend, ops

MLA_OLD = "def mla_decode_fwd(q, kv_buffer, o): ...\n"
MLA_NEW = "def mla_decode_fwd(q, kv_buffer, o, causal=True): ...\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install an AITER below a folder of its own, and forget its modules."""

    def run(release, mla, **words):
        install_aiter(tmp_path, monkeypatch, release, **words)
        (tmp_path / "aiter" / "mla.py").write_text(mla)

    names = [name for name in sys.modules if name.split(".")[0] == "aiter"]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    yield run
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]


def hardware(arch):
    return DeviceInfo(vendor="rocm", arch=arch)


def codes(problem, device):
    return {reason.code for reason in backend.refusals(problem, device)}


@pytest.mark.parametrize("release", ["0.1.16.post6", "0.1.20.post1"])
def test_gfx942_has_none_in_any_release_and_upgrade_is_no_advice(release):
    device = device_of("gfx942", release)
    assert backend.supports_non_causal(device) is False
    reasons = backend.refusals(problem_of(16, 4, causal=False), device)
    assert {reason.code for reason in reasons} == {RefusalCode.MASK}
    assert not any("upgrade" in reason.fix for reason in reasons)


def test_gfx950_has_them_from_0_1_20_on():
    assert backend.supports_non_causal(device_of("gfx950", "0.1.20"))
    with pytest.raises(OutdatedLibraryError) as caught:
        backend.supports_non_causal(device_of("gfx950", "0.1.19.post2"))
    assert caught.value.installed == "0.1.19.post2"
    assert caught.value.first_supported == "0.1.20"


def test_auto_selection_stops_at_an_outdated_aiter():
    device = device_of("gfx950", "0.1.19.post2")
    with pytest.raises(OutdatedLibraryError):
        select(problem_of(16, 4, causal=False), device)
    problem = problem_of(16, 4, causal=False)
    assert RefusalCode.VERSION in codes(problem, device)
    chosen = select(problem, device, lowering="exact")
    assert chosen.backend.name == "rocm_aiter"
    assert chosen.plan.kind == "fold"


def test_the_installed_signature_decides(install):
    install("0.1.19.post2", MLA_OLD)
    with pytest.raises(OutdatedLibraryError, match=r"0\.1\.19\.post2"):
        backend.supports_non_causal(hardware("gfx950"))
    assert backend.supports_non_causal(hardware("gfx942")) is False


def test_the_installed_table_decides_last_and_is_named(install, tmp_path):
    rows = table_csv("0.1.20.post1", "gfx950").splitlines()
    masked = [rows[0]] + [row for row in rows[1:] if row.split(",")[6] == "1"]
    tables = {"gfx950": "\n".join(masked) + "\n"}
    install("0.1.20.post1", MLA_NEW, tables=tables)
    device = hardware("gfx950")
    assert backend.supports_non_causal(device) is False
    (reason,) = backend.refusals(problem_of(16, 4, causal=False), device)
    assert reason.code is RefusalCode.MASK
    assert str(tmp_path) in reason.got


def test_an_installed_aiter_with_both_is_accepted(install):
    install("0.1.20.post1", MLA_NEW)
    device = hardware("gfx950")
    assert backend.supports_non_causal(device)
    assert backend.refusals(problem_of(16, 4, causal=False), device) == []


def test_old_rows_that_say_causal_0_are_not_taken_for_unmasked(install):
    """Up to 0.1.19.post2 every decode row says causal=0 although its kernel masks."""
    install("0.1.19.post2", MLA_OLD)
    device = hardware("gfx950")
    assert codes(problem_of(16, 4, causal=False), device) == {RefusalCode.VERSION}
    assert backend.refusals(problem_of(16, 4), device) == []


def test_an_installed_table_overrules_the_releases_own(install):
    rows = table_csv("0.1.20.post1", "gfx950").splitlines()
    kept = [row for row in rows if not row.startswith("bf16,bf16,32,1,4,0")]
    install("0.1.20.post1", MLA_NEW, tables={"gfx950": "\n".join(kept) + "\n"})
    problem = problem_of(16, 8, causal=False)
    assert codes(problem, hardware("gfx950")) == {RefusalCode.QUERY_LEN}
    assert codes(problem, device_of("gfx950")) == set()


def test_a_version_whose_signature_differs_is_refused(install):
    install("0.1.20.post1", MLA_OLD)
    assert RefusalCode.VERSION in codes(problem_of(16, 4), hardware("gfx950"))


def test_an_unknown_release_is_refused_with_the_probe(install):
    install("0.1.25", MLA_NEW)
    reasons = backend.refusals(problem_of(16, 4), hardware("gfx950"))
    assert [reason.code for reason in reasons] == [RefusalCode.VERSION]
    assert "mla-decode probe rocm_aiter" in reasons[0].fix


def test_a_missing_library_hides_no_other_reason():
    problem = problem_of(200, 4, dtypes="fp16 fp16", out_dtype="fp16")
    found = codes(problem, hardware("gfx950"))
    assert found >= {
        RefusalCode.DEPENDENCY,
        RefusalCode.NUM_HEADS,
        RefusalCode.DTYPE,
    }


def test_a_missing_library_does_not_count_on_an_assumed_device():
    assert codes(problem_of(16, 4), DeviceInfo.assume("gfx950")) == set()


def test_a_broken_import_keeps_its_text(install):
    install("0.1.20.post1", "raise ImportError('GLIBCXX_3.4.31 not found')\n")
    (reason,) = backend.refusals(problem_of(16, 4), hardware("gfx950"))
    assert reason.code is RefusalCode.IMPORT
    assert "GLIBCXX_3.4.31" in reason.got


def test_a_module_that_is_being_built_is_not_a_broken_import(install):
    install(
        "0.1.20.post1",
        "raise ModuleNotFoundError(\"No module named 'aiter.jit.module_x'\")\n",
    )
    (reason,) = backend.refusals(problem_of(16, 4), hardware("gfx950"))
    assert reason.code is RefusalCode.FEATURE
    assert "wait" in reason.fix


def test_a_failed_import_is_not_remembered(install, tmp_path):
    install("0.1.20.post1", "raise ImportError('later')\n")
    device = hardware("gfx950")
    assert codes(problem_of(16, 4), device) == {RefusalCode.IMPORT}
    (tmp_path / "aiter" / "mla.py").write_text(MLA_NEW + "# longer\n")
    sys.modules.pop("aiter.mla", None)
    assert codes(problem_of(16, 4), device) == set()


def test_a_build_lock_is_seen_before_an_import_that_would_wait(install, tmp_path):
    install("0.1.20.post1", "raise SystemExit('imported')\n")
    build = tmp_path / "aiter" / "jit" / "build"
    build.mkdir(parents=True)
    (build / "lock_module_mla_asm").write_text("")
    (reason,) = backend.refusals(problem_of(16, 4), hardware("gfx950"))
    assert "lock_module_mla_asm" in reason.got


def test_an_import_without_the_function_names_it(install):
    install("0.1.20.post1", "x = 1\n")
    (reason,) = backend.refusals(problem_of(16, 4), hardware("gfx950"))
    assert reason.code is RefusalCode.IMPORT
    assert "mla_decode_fwd" in reason.got


@pytest.fixture
def clean_modules():
    """Take a simulated AITER out of the process again."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.mark.usefixtures("clean_modules")
def test_the_variable_simulates_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setenv("MLA_DECODE_SIMULATE", "rocm_aiter:gfx950:0.1.19.post2")
    cpu = DeviceInfo(vendor="cpu", arch="cpu")
    assert codes(problem_of(16, 4), cpu) == set()
    with pytest.raises(OutdatedLibraryError):
        backend.supports_non_causal(cpu)
    assert backend.evidence(cpu) == "simulated, never on AMD"
    builder = backend.builder_cls(problem_of(16, 4), cpu)
    assert builder.library.release == "0.1.19.post2"
    assert importlib.import_module("aiter.mla").mla_decode_fwd is builder.library.decode
    with pytest.raises(OutdatedLibraryError):
        ops.mla_decode_supports_non_causal()


@pytest.mark.parametrize("text", ["rocm_aiter", "rocm_aiter:gfx950", "rocm_aiter::1"])
def test_a_malformed_variable_is_an_error(monkeypatch, text):
    monkeypatch.setenv("MLA_DECODE_SIMULATE", text)
    with pytest.raises(ArgumentError, match="MLA_DECODE_SIMULATE"):
        backend.refusals(problem_of(), DeviceInfo(vendor="cpu", arch="cpu"))


def test_another_backends_variable_is_not_ours(monkeypatch):
    monkeypatch.setenv("MLA_DECODE_SIMULATE", "cuda_flashmla:sm_90:1")
    cpu = DeviceInfo(vendor="cpu", arch="cpu")
    assert codes(problem_of(), cpu) == {RefusalCode.ARCH}


def test_is_found_through_its_entry_point():
    assert discover()["rocm_aiter"].backend is backend


def test_reports_the_library_and_kernels_in_use():
    device = device_of("gfx950")
    assert backend.library_versions(device) == {"amd-aiter": "0.1.20.post1"}
    assert backend.kernel_names(problem_of(16, 8, causal=False), device) == [
        "mla_a16w16_qh32_qseqlen4_gqaratio32_msk0_ps"
    ]


def test_the_cli_option_names_a_release():
    (option,) = backend.cli_options
    assert (option.name, option.default) == ("--aiter-release", "0.1.20.post1")
    device = option.apply(DeviceInfo.assume("gfx950"), "0.1.16")
    assert device.libraries["amd-aiter"] == "0.1.16"
    nvidia = DeviceInfo.assume("sm_90")
    assert option.apply(nvidia, "0.1.16") is nvidia
