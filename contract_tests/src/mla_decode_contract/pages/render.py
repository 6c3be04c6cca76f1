"""The two forms of a page, from templates that escape whatever they print."""

from __future__ import annotations

from functools import cache

import jinja2

from mla_decode_contract.pages import markdown
from mla_decode_contract.pages.view import View, worst_units

_LOADER = jinja2.PackageLoader("mla_decode_contract.pages")


def _words(name: str) -> str:
    return name.replace("_", " ")


_FILTERS = {"words": _words, "worst_units": worst_units}


def as_html(page: View) -> str:
    """One HTML file: no script, no request to anywhere, a dark and a light form."""
    return _html().get_template("page.html.jinja").render(page=page)


def as_markdown(page: View) -> str:
    """Markdown that GitHub shows well."""
    return _markdown().get_template("page.md.jinja").render(page=page)


@cache
def _html() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=_LOADER,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(_FILTERS)
    return made


@cache
def _markdown() -> jinja2.Environment:
    made = jinja2.Environment(  # noqa: S701 - `finalize` escapes, for Markdown
        loader=_LOADER,
        finalize=markdown.escaped,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(_FILTERS, code=markdown.code, block=markdown.block)
    return made
