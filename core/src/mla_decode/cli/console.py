"""Where commands print for people: as wide as the terminal, unwrapped into a pipe."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console, RenderHook
from rich.segment import Segment

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, ConsoleRenderable, RenderResult

_UNWRAPPED = 400


class _Trimmed:
    """What it shows, without the blanks that a table ends its lines with."""

    def __init__(self, shown: ConsoleRenderable) -> None:
        self.shown = shown

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        for line in console.render_lines(self.shown, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                line.append(last._replace(text=last.text.rstrip()))
            yield from line
            yield Segment.line()


class _Trim(RenderHook):
    def process_renderables(
        self, renderables: list[ConsoleRenderable]
    ) -> list[ConsoleRenderable]:
        return [_Trimmed(shown) for shown in renderables]


def console() -> Console:
    """Standard output; what is piped is not cut into lines of 80, so that grep finds it.

    `COLUMNS` in the environment has the last word. No line ends in blanks.
    """
    is_cut = sys.stdout.isatty() or "COLUMNS" in os.environ
    out = Console() if is_cut else Console(width=_UNWRAPPED)
    out.push_render_hook(_Trim())
    return out
