"""Where a command may write its picture: asked before anything is run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mla_decode.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path


def require_place(path: Path, formats: Collection[str] = ()) -> None:
    """Refuse a picture that could not be written once it is drawn.

    Args:
        path: Of the picture.
        formats: What its name may end in, without the dot; empty: anything.

    Raises:
        ArgumentError: It is a directory, its directory is absent or closed, or its
            name ends in no known format.
    """
    folder = path.parent
    is_open = folder.is_dir() and os.access(folder, os.W_OK)
    if path.is_dir() or not is_open:
        raise ArgumentError(
            "The picture cannot be written there.",
            got=str(path),
            allowed="a file in a directory that exists and can be written to",
            fix="name another file with --plot",
        )
    ending = path.suffix.removeprefix(".").lower()
    if formats and ending and ending not in formats:
        raise ArgumentError(
            "The picture's name ends in no format that can be drawn.",
            got=path.name,
            allowed=", ".join(sorted(formats)),
            fix="name a file such as figure.png with --plot",
        )
