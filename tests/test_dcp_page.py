"""docs/dcp.md shows the figures that are kept, and claims no more."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def writer():
    path = ROOT / "tools" / "dcp_page.py"
    spec = importlib.util.spec_from_file_location("dcp_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_figures_make(writer):
    text = writer.PAGE.read_text(encoding="utf-8")
    assert set(writer.PARTS) == {part for _, part, _ in writer.PART.findall(text)}
    assert writer.page(text) == text, "run: python tools/dcp_page.py"


def test_a_method_without_figures_is_said_to_be_unmeasured(
    writer, tmp_path, monkeypatch
):
    row = {
        "backend": "triton_mla",
        "S": 16384,
        "B": 1,
        "Q": 8,
        "method": "graph",
        "step_us": 1234.4,
        "decode_us": 1200.0,
        "merge_share": -0.01,
        "one_rank_us": 2000.0,
        "speedup": 1.62,
    }
    run = {"ranks": 2, "device": "D", "date": "2026-11-29", "library": "L", "heads": 8}
    (tmp_path / "dcp_time.json").write_text(json.dumps({**run, "rows": [row]}))
    monkeypatch.setattr(writer, "FIGURES", tmp_path)
    written = writer.times()
    assert "| `triton_mla` | 16k | 1 | 8 | 1,234 | 0% | 2,000 | 1.62x |" in written
    assert written.endswith("Not measured yet.\n")
