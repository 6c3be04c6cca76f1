"""Write a page and a badge beside the report that they show."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mla_decode_contract.pages.badge import badge
from mla_decode_contract.pages.form import Form
from mla_decode_contract.pages.reading import read_source
from mla_decode_contract.pages.render import as_html, as_markdown
from mla_decode_contract.pages.view import view
from mla_decode_contract.reading import ReportProblem

if TYPE_CHECKING:
    from pathlib import Path

BADGE = "badge.json"


def publish(directory: Path, form: Form) -> tuple[Path, Path]:
    """Make the page of a run, and its badge.

    Args:
        directory: Holds ``report.json``; a ``prove.json`` beside it is shown too.
        form: Markdown, or one HTML file.

    Returns:
        The page, ``report.md`` or ``report.html``, and ``badge.json``.

    Raises:
        ReportProblem: There is no report of the kit, or nowhere to write.
    """
    source = read_source(directory)
    render = as_html if form is Form.HTML else as_markdown
    page, shown = directory / f"report.{form.value}", directory / BADGE
    made = {
        page: render(view(source)),
        shown: json.dumps(badge(source.report), indent=2) + "\n",
    }
    for path, text in made.items():
        _write(path, text)
    return page, shown


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportProblem(
            f"{path} cannot be written",
            got=str(error.strerror),
            allowed="a directory that can be written to",
            fix="Copy the report to one.",
        ) from error
