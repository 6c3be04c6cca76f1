"""Received reports are checked, kept, and become evidence only where they prove it."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla_decode import DeviceInfo

ROOT = Path(__file__).parents[1]
KEPT = sorted((ROOT / "docs" / "reports" / "hardware").glob("*.json"))


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "hardware_reports.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report():
    """A received report, conformant, of an NVIDIA H200."""
    path = next(path for path in KEPT if path.name.startswith("triton_mla-sm_90-"))
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def receive(tool, tmp_path):
    """Add a report to an empty folder; give the outcome and what the folder holds."""

    def run(report, *options):
        import typer

        received, folder = tmp_path / "received.json", tmp_path / "kept"
        received.write_text(report if isinstance(report, str) else json.dumps(report))
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(tool.add)
        words = [str(received), "--folder", str(folder), *options]
        result = CliRunner().invoke(app, words)
        return result, tool.kept(folder)

    return run


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_every_kept_report_is_one_of_the_hardware_and_named_after_it(tool, path):
    assert path.name == tool.read(path).file_name


def test_a_received_report_is_kept_and_proves_its_own_arch_and_backend(receive, report):
    result, kept = receive(report)
    assert result.exit_code == 0, result.output
    [one] = kept
    assert one.proves("triton_mla", DeviceInfo.assume("sm_90"))
    assert not one.proves("triton_mla", DeviceInfo.assume("sm_100"))
    assert not one.proves("cuda_flashmla", DeviceInfo.assume("sm_90"))


@pytest.mark.parametrize(
    ("asked", "proved"), [("hopper", False), ("portable", False), ("auto", True)]
)
def test_a_report_proves_the_defaults_where_the_choice_was_left_to_them(
    receive, report, asked, proved
):
    _, [one] = receive(report, "--asked", asked)
    assert one.asked == asked
    assert one.file_name.endswith(f"-{asked}.json")
    assert one.proves("triton_mla", DeviceInfo.assume("sm_90")) is proved


def test_no_kept_report_of_one_kernel_proves_the_choice_between_them(tool):
    kernels = [one for one in tool.kept() if one.asked in ("hopper", "portable")]
    assert {one.asked for one in kernels} == {"hopper", "portable"}
    device = DeviceInfo.assume("sm_90")
    assert not any(one.proves("triton_mla", device) for one in kernels)


def test_a_kept_report_names_its_commit_and_not_the_machines_kernel(
    receive, report, tmp_path
):
    report["platform"] = "Linux-6.1.2-of-someone-x86_64-with-glibc2.39"
    for known, kept in ((None, "abc"), ("def", "def")):
        report["adapter"]["commit"] = known
        receive(report, "--commit", "abc")
        [path] = (tmp_path / "kept").glob("*.json")
        text = json.loads(path.read_text(encoding="utf-8"))
        assert text["adapter"]["commit"] == kept
        assert text["platform"] == "Linux-x86_64-with-glibc2.39"


def test_a_report_proves_no_other_release_of_the_library(receive, report):
    report["adapter"]["backend"] = "rocm_aiter"
    report["device"]["arch"] = "gfx950"
    report["libraries"] = {"amd-aiter": "0.1.20.post1"}
    _, [one] = receive(report)
    for release, proved in (("0.1.20.post1", True), ("0.1.19.post2", False)):
        device = DeviceInfo.assume("gfx950", libraries={"amd-aiter": release})
        assert one.proves("rocm_aiter", device) is proved


def test_a_report_that_found_faults_is_kept_and_proves_nothing(receive, report):
    report["exit_code"], report["verdict"] = 1, "not conformant (hardware)"
    report["cases"][0]["outcome"] = "failed"
    result, [one] = receive(report)
    assert result.exit_code == 0
    assert one.failed == (report["cases"][0]["id"],)
    assert not one.proves("triton_mla", DeviceInfo.assume("sm_90"))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("evidence", "simulated", "'simulated', not 'hardware'"),
        ("quick", True, "the whole kit is wanted"),
        ("mutant", "mask_ignored", "the whole kit is wanted"),
        ("counts", {}, "not a report of the contract kit"),
    ],
)
def test_what_is_no_evidence_is_refused_and_not_kept(
    receive, report, field, value, complaint
):
    report[field] = value
    result, kept = receive(report)
    assert result.exit_code == 4
    assert complaint in result.output
    assert kept == ()


def test_what_is_no_json_is_refused(receive):
    result, kept = receive("verdict: conformant")
    assert result.exit_code == 4
    assert "not a report of the contract kit" in result.output
    assert kept == ()
