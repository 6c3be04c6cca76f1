"""Where commands print for people: as wide as the terminal, unwrapped into a pipe."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_UNWRAPPED = 400


def console() -> Console:
    """Standard output; what is piped is not cut into lines of 80, so that grep finds it.

    `COLUMNS` in the environment has the last word.
    """
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console()
    return Console(width=_UNWRAPPED)
