"""The published pages show the reports that lie beside them, and claim no more."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def publisher():
    path = ROOT / "tools" / "publish_reports.py"
    spec = importlib.util.spec_from_file_location("publish_reports", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_pages_are_what_the_report_command_makes(publisher):
    found = publisher.kept()
    assert len(found) >= len(publisher.RUNS)
    stale = [
        str(each.folder.relative_to(ROOT) / name)
        for each in found
        for name, text in each.pages().items()
        if not (each.folder / name).exists()
        or (each.folder / name).read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run: python tools/publish_reports.py render"


def test_the_index_lists_them_all(publisher):
    written = (publisher.KEPT / publisher.INDEX).read_text(encoding="utf-8")
    assert written == publisher.index()


def test_each_backend_has_a_page_with_the_evidence_that_a_cpu_can_give(publisher):
    evidence = {}
    for each in publisher.RUNS:
        report = publisher.KEPT / each.label / "report.json"
        evidence[each.label] = json.loads(report.read_text("utf-8"))["evidence"]
    assert evidence == {
        "reference": "reference",
        "rocm_aiter-gfx942": "simulated",
        "rocm_aiter-gfx950": "simulated",
        "cuda_flashmla-sm_90": "simulated",
        "triton_mla-sm_90": "interpreted",
    }
