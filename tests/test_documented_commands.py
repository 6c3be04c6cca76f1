"""Commands of the pages are ones that the kit's command line takes."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from mla_decode_contract.cli import app

ROOT = Path(__file__).parents[1]
PAGES = (
    "docs/hardware-ci.md",
    "docs/adapter.md",
    "docs/reports.md",
    "docs/first-hour.md",
)
FENCE = re.compile(r"^```(?:console|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHERS = r"&&|\|\||\||>|;"
"""Where a command ends and another, or a redirection, begins."""
GROUP = typer.main.get_command(app)


def commands(text):
    """Each command of the kit in a page's blocks, as its words."""
    for block in FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        for line in lines:
            for part in re.split(OTHERS, line.removeprefix("$ ")):
                words = shlex.split(part, comments=True)
                if "mla-decode-contract" in words[:1]:
                    yield words[1:]


FOUND = [
    pytest.param(words, id=f"{page}: {' '.join(words)}")
    for page in PAGES
    for words in commands((ROOT / page).read_text(encoding="utf-8"))
]


def _parse(words):
    name, *arguments = words
    return GROUP.commands[name].make_context(name, list(arguments))


@pytest.mark.parametrize("words", FOUND)
def test_the_command_line_takes_what_a_page_says(words):
    assert _parse(words).params


def test_pages_show_every_command_for_owners_and_authors():
    named = {param.values[0][0] for param in FOUND}
    assert {"run", "prove", "report", "new", "diff", "merge"} <= named


@pytest.mark.parametrize(
    "words", [["run", "x", "--no-such-option"], ["run"], ["diff", "one"]]
)
def test_a_wrong_command_would_be_found(words):
    with pytest.raises(Exception, match=r"No such option|Missing parameter") as found:
        _parse(words)
    assert type(found.value).__module__.endswith("exceptions")


def test_finds_a_command_behind_another_and_over_two_lines():
    page = "```console\n$ cd x && mla-decode-contract run \\\n  y > z\n```\n"
    assert list(commands(page)) == [["run", "y"]]
