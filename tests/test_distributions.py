"""Each distribution is complete, and the pages name only sessions that exist."""

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(
    path.parent
    for pattern in ("core", "contract_tests", "adapters/*", "engines/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
)
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*.md")})


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def folder(request):
    return request.param


@pytest.fixture
def project(folder):
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]


def test_holds_what_a_distribution_holds(folder):
    for name in ("README.md", "CHANGELOG.md", "src", "tests"):
        assert (folder / name).exists(), name
    licence = (folder / "LICENSE").read_text(encoding="utf-8")
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert len(list(folder.glob("src/*/py.typed"))) == 1
    assert list(folder.glob("tests/**/test_*.py"))


def test_changelog_has_an_entry_for_the_version(folder, project):
    text = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    entry = text.split(f"## {project['version']}")[1].split("\n## ")[0]
    assert re.search(r"^- \w", entry, re.MULTILINE)


def test_supports_the_pythons_that_the_sessions_test(project):
    prefix = "Programming Language :: Python :: 3."
    named = [c for c in project["classifiers"] if c.startswith(prefix)]
    assert named == [prefix + minor for minor in ("10", "11", "12", "13")]
    assert project["requires-python"] == ">=3.10"


def sessions(source):
    """Names of the sessions that a noxfile defines by decorated functions."""
    return {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and any("nox.session" in ast.unparse(d) for d in node.decorator_list)
    }


def test_pages_name_only_sessions_that_exist():
    known = sessions((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    asked = {
        (page.relative_to(ROOT).as_posix(), name)
        for page in PAGES
        for name in re.findall(r"\bnox -s ([\w.-]+)", page.read_text(encoding="utf-8"))
    }
    assert {"tests", "demo", "contract", "wheels"} <= known
    assert ("README.md", "demo") in asked
    unknown = {
        (page, name)
        for page, name in asked
        if name not in known and not re.fullmatch(r"tests-3\.(1[0-3]|x)", name)
    }
    assert unknown == set()
