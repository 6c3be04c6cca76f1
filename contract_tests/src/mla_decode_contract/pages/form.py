"""The two forms of a page."""

from __future__ import annotations

import enum


class Form(str, enum.Enum):
    """What a page can be."""

    MD = "md"
    """Markdown that GitHub shows well."""
    HTML = "html"
    """One file without requests to anywhere."""
