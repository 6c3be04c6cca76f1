"""Commands of the pages are ones that the command lines take, and print what is shown."""

import os
import re
import shlex
import subprocess
import sys
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
SETTING = re.compile(r"[A-Z_]+=")
"""Of the environment, before a command."""
EXPLAIN = re.compile(r"^\$ mla-decode (explain .*)\n((?:(?!\$ ).*\n)+)", re.MULTILINE)
"""An explain and what it is said to print."""
LINES = re.compile(r"[\u2500-\u257f]")
GROUP = typer.main.get_command(app)


def commands(text):
    """Each command of the kit in a page's blocks, as its words."""
    for block in FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        for line in lines:
            for part in re.split(OTHERS, line.removeprefix("$ ")):
                words = shlex.split(part, comments=True)
                while words and SETTING.match(words[0]):
                    words.pop(0)
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
    page = "```console\n$ cd x && A_B=1 mla-decode-contract run \\\n  y > z\n```\n"
    assert list(commands(page)) == [["run", "y"]]


def shown(text):
    """Each explain of a page with an output below it: its words, and the output's."""
    for block in FENCE.findall(text):
        for command, output in EXPLAIN.findall(block.replace("\\\n", " ")):
            yield shlex.split(command), LINES.sub(" ", output).split()


SHOWN = [
    pytest.param(words, output, id=f"{page.name}: {' '.join(words)}")
    for page in sorted(ROOT.glob("docs/*.md"))
    for words, output in shown(page.read_text(encoding="utf-8"))
]


def test_some_page_shows_what_explain_prints_of_the_hopper_kernel():
    assert any("sm_90" in param.values[0] for param in SHOWN)


@pytest.mark.parametrize(("words", "output"), SHOWN)
def test_a_page_shows_what_explain_prints(words, output):
    script = "from mla_decode.cli import main; main()"
    environment = {**os.environ, "MLA_DECODE_TRITON_KERNEL": ""}
    told = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={**environment, "PYTHONIOENCODING": "utf-8"},
    )
    assert LINES.sub(" ", told.stdout).split() == output


def test_the_gain_of_a_block_is_measured_on_one_thread():
    page = (ROOT / "docs/first-hour.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ (.*)mla-decode bench ", page, re.MULTILINE)
    assert command == "OMP_NUM_THREADS=1 "
