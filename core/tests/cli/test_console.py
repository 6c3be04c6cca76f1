"""Tables and trees for people: the terminal's width, or unwrapped into a pipe."""

import io
import sys

import pytest
from rich.table import Table
from rich.text import Text

from mla_decode.cli.console import console

LINE = "word " * 60


@pytest.fixture
def printed(monkeypatch):
    """Print a long line to a pipe or a terminal; give it back."""

    def run(*, terminal, columns=None, shown=None):
        stdout = io.StringIO()
        stdout.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdout", stdout)
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        console().print(Text(LINE) if shown is None else shown)
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


def test_no_line_of_a_table_ends_in_blanks(printed):
    table = Table(box=None, pad_edge=False)
    table.add_row("a", "short", "")
    table.add_row("b", "the longest of its column\n\nand another line", "c")
    lines = printed(terminal=False, shown=table).splitlines()
    assert lines[1:] == [
        "a  short",
        "b  the longest of its column  c",
        "",
        "   and another line",
    ]
