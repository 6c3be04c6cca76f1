"""AITER MLA decode on AMD gfx942 and gfx950 behind the mla-decode contract."""

from __future__ import annotations

from .keys import KernelKey
from .profiles import DEFAULT_RELEASE, PINNED_RELEASE, find_profile, known_releases
from .resolve import resolve

__all__ = [
    "DEFAULT_RELEASE",
    "PINNED_RELEASE",
    "KernelKey",
    "find_profile",
    "known_releases",
    "resolve",
]
