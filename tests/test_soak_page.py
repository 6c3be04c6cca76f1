"""docs/soak.md shows the log that is kept, and the plot that is drawn of it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def writer():
    path = ROOT / "tools" / "soak_page.py"
    spec = importlib.util.spec_from_file_location("soak_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_log_makes(writer):
    text = writer.PAGE.read_text(encoding="utf-8")
    assert writer.PART.search(text)
    assert writer.page(text) == text, "run: python tools/soak_page.py"


def test_the_page_shows_the_plot(writer):
    shown = writer.PLOT.relative_to(writer.PAGE.parent).as_posix()
    assert f"]({shown})" in writer.PAGE.read_text(encoding="utf-8")
    assert writer.PLOT.read_text(encoding="utf-8").startswith("<?xml")


def test_every_kind_of_step_is_counted_in_its_backends_row(writer):
    log = writer.read()
    counted = sum(int(row[1].replace(",", "")) for row in writer.rows(log))
    assert counted == log["steps_done"] == sum(log["kinds"].values())
