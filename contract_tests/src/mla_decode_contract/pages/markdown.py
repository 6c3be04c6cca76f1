"""Markdown that shows any text as it is: what a template prints is escaped."""

from __future__ import annotations

import html
import re
from typing import Any

_SPECIAL = re.compile(r"([\\`*_{}\[\]#])")
_NO_BACKSLASH = {"|": "&#124;", "~": "&#126;", "$": "&#36;"}
"""Marks that not every reader of Markdown lets a backslash escape."""
_FENCE = re.compile("`+")


class Literal(str):
    """Markdown already: printed as it stands."""

    __slots__ = ()


def escaped(value: Any) -> Literal:
    """A value as text on one line that no Markdown reader takes for markup or HTML."""
    if isinstance(value, Literal):
        return value
    line = html.escape(" ".join(str(value).split()), quote=False)
    line = _SPECIAL.sub(r"\\\1", line)
    for mark, entity in _NO_BACKSLASH.items():
        line = line.replace(mark, entity)
    return Literal(line)


def code(value: Any) -> Literal:
    """A value as a code span on one line, also inside a table."""
    line = " ".join(str(value).split()) or " "
    fence = "`" * (_longest_run(line) + 1)
    pad = " " if "`" in line else ""
    return Literal(f"{fence}{pad}{line}{pad}{fence}".replace("|", "\\|"))


def block(value: Any) -> Literal:
    """A value as a fenced block that it cannot end."""
    text = str(value).rstrip()
    fence = "`" * max(3, _longest_run(text) + 1)
    return Literal(f"{fence}text\n{text}\n{fence}")


def _longest_run(text: str) -> int:
    return max((len(run) for run in _FENCE.findall(text)), default=0)
