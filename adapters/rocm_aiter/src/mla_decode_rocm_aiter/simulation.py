"""The environment variable that asks for a simulated AITER."""

from __future__ import annotations

import os

from mla_decode.errors import ArgumentError

VARIABLE = "MLA_DECODE_SIMULATE"
"""`rocm_aiter:<arch>:<release>` simulates that AITER in this process."""


def read_variable(text: str | None = None) -> tuple[str, str] | None:
    """(arch, release) of `MLA_DECODE_SIMULATE`, or None where it speaks of another.

    Raises:
        ArgumentError: The value names rocm_aiter and is not
            `rocm_aiter:<arch>:<release>`.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    backend, _, rest = text.partition(":")
    if backend != "rocm_aiter":
        return None
    arch, _, release = rest.partition(":")
    if not arch or not release:
        raise ArgumentError(
            f"{VARIABLE} names no arch and release to simulate.",
            got=repr(text),
            allowed="rocm_aiter:<arch>:<release>",
            fix=f"unset {VARIABLE}, or write rocm_aiter:gfx950:0.1.20.post1",
        )
    return arch, release
