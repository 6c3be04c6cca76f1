"""The Python examples of the README and of the documentation run as they stand.

A block is left out only where the line above it is ``<!-- not run: REASON -->``.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "*/README.md", "adapters/*/README.md")
    for page in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\n\Z")


def snippets(text):
    """The examples of a page, each with the line on which it begins."""
    for block in FENCE.finditer(text):
        before = text[: block.start()]
        if not NOT_RUN.search(before):
            yield before.count("\n") + 2, block[1]


EXAMPLES = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}:{line}")
    for page in PAGES
    for line, code in snippets(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs_as_it_stands(code, tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_readme_holds_an_engine_example_of_at_most_fifteen_lines():
    [(_, code)] = snippets((ROOT / "README.md").read_text(encoding="utf-8"))
    lines = [line for line in code.splitlines() if line.strip()]
    assert "MLADecoder(" in code
    assert len(lines) <= 15


def test_finds_an_example_and_leaves_out_one_that_says_why():
    page = (
        "a\n```python\nx = 1\n```\n<!-- not run: needs a GPU -->\n```python\ny\n```\n"
        "```text\nz\n```\n"
    )
    assert list(snippets(page)) == [(3, "x = 1\n")]


def test_an_omission_without_a_reason_is_run():
    page = "<!-- not run: -->\n```python\ny\n```\n"
    assert [code for _, code in snippets(page)] == ["y\n"]
