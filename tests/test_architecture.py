"""ARCHITECTURE.md speaks of modules that exist, and of every distribution."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def writer():
    path = ROOT / "tools" / "architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_only_modules_that_exist(writer):
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (\S+): `(\w+)`$", text, flags=re.MULTILINE)[1:]
    folders = sections[::3]
    gone = {
        f"{folder}/src/{package}/{name}"
        for folder, package, body in zip(
            folders, sections[1::3], sections[2::3], strict=True
        )
        for name in re.findall(r"^- `([^`]+)`", body, re.MULTILINE)
        if not (ROOT / folder / "src" / package / name).exists()
    }
    assert gone == set(), "run python tools/architecture.py"
    assert set(folders) <= set(writer.DISTRIBUTIONS)
    assert {"core", "contract_tests", "adapters/triton_mla"} <= set(folders)


def test_takes_the_first_sentence_of_a_docstring(writer):
    assert writer.purpose('"""One\nline.\n\nMore."""\nx = 1\n') == "One line"


def test_lists_a_folder_by_what_its_init_says(writer, tmp_path):
    for name, source in (
        ("pkg/__init__.py", '"""The package."""'),
        ("pkg/a.py", '"""A module."""'),
        ("pkg/sub/__init__.py", '"""A folder."""'),
        ("pkg/bare/__init__.py", ""),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    listed = list(writer.modules(tmp_path / "pkg"))
    assert listed == [("a.py", "A module"), ("sub/", "A folder")]
