"""What users read is run, what the doctor says helps, and races are called races."""

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from fault_packages import write_package
from fault_steps import CPU

from mla_decode import DeviceInfo, discover
from mla_decode.cli import entry
from mla_decode.diagnosis import backends
from mla_decode.diagnosis import doctor as diagnosis
from mla_decode.diagnosis.children import MARK, ChildAnswer
from mla_decode.diagnosis.torch_build import TorchBuild
from mla_decode.discovery import KNOWN_DISTRIBUTIONS
from mla_decode.reference import ReferenceBackend
from mla_decode.selection import AUTO_ORDER
from mla_decode_contract.mutants import MUTANTS
from mla_decode_contract.outcome import FailureKind, Outcome
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.fault("DOCS-02")
def test_the_readmes_example_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert examples
    for example in examples:
        exec(example, {"__name__": "example"})  # noqa: S102 - that is the test


@pytest.mark.fault("DOCS-02")
def test_no_page_has_an_example_that_the_tests_leave_out_without_a_reason():
    tests = (ROOT / "tests" / "test_snippets.py").read_text(encoding="utf-8")
    patterns = re.search(r"for pattern in \((.*?)\)\n", tests, re.DOTALL)[1]
    covered = {
        page
        for pattern in re.findall(r'"([^"]+)"', patterns)
        for page in ROOT.glob(pattern)
    }
    missed = [
        str(page.relative_to(ROOT))
        for page in markdown_files()
        if page not in covered and FENCE.search(page.read_text(encoding="utf-8"))
    ]
    assert missed == []


def markdown_files():
    """Pages of the repository; not of what is built or installed in it."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name[0] != "." and name != "site"]
        yield from (Path(folder, name) for name in files if name.endswith(".md"))


def in_this_process(code, *arguments, timeout_s):
    """What a child would answer, without the seconds that a child takes."""
    del timeout_s
    with contextlib.redirect_stdout(io.StringIO()) as out:
        argv, sys.argv = sys.argv, ["-c", *arguments]
        try:
            exec(code, {})  # noqa: S102 - a child would run the same
        finally:
            sys.argv = argv
    lines = (line.partition(MARK) for line in out.getvalue().splitlines())
    said = tuple(json.loads(rest) for _, mark, rest in lines if mark)
    return ChildAnswer(said=said, trouble="")


@pytest.fixture
def run_doctor(monkeypatch, capsys):
    """Run the command on a machine of an arch; (exit code, findings by section)."""
    monkeypatch.setattr(backends, "ask_child", in_this_process)

    def run(arch):
        vendor = DeviceInfo.assume(arch).vendor
        build = TorchBuild(
            version="2.13.0",
            hip="7.1" if vendor == "rocm" else None,
            cuda="13.0" if vendor == "cuda" else None,
            arch="" if arch == "cpu" else arch,
            archs=(arch,),
        )
        monkeypatch.setattr(diagnosis, "ask_torch", lambda _timeout_s: build)
        monkeypatch.setattr(
            sys, "argv", ["mla-decode", "doctor", "--json", "--arch", arch]
        )
        with pytest.raises(SystemExit) as stopped:
            entry.main()
        sections = json.loads(capsys.readouterr().out)["sections"]
        return stopped.value.code or 0, {s["about"]: s["findings"] for s in sections}

    return run


def _is_error(finding):
    return finding["level"] == "error"


HINTS = {
    "rocm_aiter": "install AITER for this ROCm from github.com/ROCm/aiter",
    "cuda_flashmla": "pip install tokenspeed-flashmla",
}


@pytest.mark.fault("DOCS-03")
@pytest.mark.parametrize("arch", ["cpu", "gfx950", "sm_90", "sm_120"])
@pytest.mark.usefixtures("forget_libraries")
def test_the_doctor_says_what_is_missing_and_how_to_install_it(arch, run_doctor):
    code, found = run_doctor(arch)
    assert set(discover()) <= set(found)
    assert found["served by"][0]["level"] == "ok"
    errors = {f["what"] for group in found.values() for f in group if _is_error(f)}
    assert errors <= {"torch sees no GPU"}  # so it is, on a machine that tests
    assert code == (1 if errors else 0)
    order = AUTO_ORDER.get(arch) or AUTO_ORDER[DeviceInfo.assume(arch).vendor]
    for name, hint in HINTS.items():
        missing = [f for f in found[name] if "not installed" in f["what"]]
        (absent,) = missing
        if name in order:
            assert absent["level"] == "warn"
            assert hint in absent["fix"]
        else:
            assert absent["level"] == "ok"
            assert "does not need it" in absent["what"]


@pytest.mark.fault("DOCS-03")
@pytest.mark.usefixtures("forget_libraries")
def test_the_doctor_fails_where_another_package_stands_in_the_way(
    run_doctor, tmp_path, monkeypatch
):
    write_package(
        tmp_path, monkeypatch, "aiter", {"__init__.py": ""}, distribution=("aiter", "1")
    )
    code, found = run_doctor("gfx950")
    assert code == 1
    (wrong,) = [f for f in found["rocm_aiter"] if f["level"] == "error"]
    assert "distribution aiter 1" in wrong["got"]


@pytest.mark.fault("DOCS-03")
def test_an_adapter_that_is_absent_is_named_with_its_install_command():
    for name, distribution in KNOWN_DISTRIBUTIONS.items():
        absent = discover([])[name]
        assert str(absent.refusal.code) == "dependency"
        assert absent.refusal.fix == f"pip install {distribution}"


@pytest.mark.fault("DOCS-04")
@pytest.mark.parametrize("case", ["repeat.bit_equal", "repeat.across_builders"])
def test_a_race_fails_the_kit_by_that_word_and_not_by_a_tolerance(case):
    racy = MUTANTS["noise_between_calls"].apply(ReferenceBackend())
    result = run_case(case, racy, Target(backend="reference", device=CPU))
    assert result.outcome is Outcome.FAILED
    assert result.failure.kind is FailureKind.VALUE
    assert "the same inputs gave other bits" in result.failure.message
    honest = run_case(case, ReferenceBackend(), Target(backend="reference", device=CPU))
    assert honest.outcome is Outcome.PASSED
