"""Tables and trees for people: the terminal's width, or unwrapped into a pipe."""

import io
import sys

import pytest
from rich.text import Text

from mla_decode.cli.console import console

LINE = "word " * 60


@pytest.fixture
def printed(monkeypatch):
    """Print a long line to a pipe or a terminal; give it back."""

    def run(*, terminal, columns=None):
        stdout = io.StringIO()
        stdout.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdout", stdout)
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        console().print(Text(LINE))
        return stdout.getvalue()

    return run


def test_a_pipe_gets_whole_lines(printed):
    assert LINE.strip() in printed(terminal=False)


@pytest.mark.parametrize("terminal", [True, False])
def test_columns_has_the_last_word(printed, terminal):
    lines = printed(terminal=terminal, columns=60).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60


def test_a_terminal_wraps_at_its_own_width(printed):
    assert len(printed(terminal=True).splitlines()) > 1
