"""docs/hopper.md shows the points that are kept, and the plot that is drawn of them."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def writer():
    path = ROOT / "tools" / "hopper_page.py"
    spec = importlib.util.spec_from_file_location("hopper_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_figures_make(writer):
    text = writer.PAGE.read_text(encoding="utf-8")
    assert writer.PART.search(text)
    assert writer.page(text) == text, "run: python tools/hopper_page.py"


def test_the_page_shows_the_plot(writer):
    shown = writer.PLOT.relative_to(writer.PAGE.parent).as_posix()
    assert f"]({shown})" in writer.PAGE.read_text(encoding="utf-8")
    assert writer.PLOT.read_text(encoding="utf-8").startswith("<?xml")
