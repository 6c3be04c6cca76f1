"""AITER MLA decode on AMD gfx942 and gfx950 behind the mla-decode contract."""

from __future__ import annotations

from mla_decode_rocm_aiter.keys import KernelKey
from mla_decode_rocm_aiter.profiles import (
    DEFAULT_RELEASE,
    PINNED_RELEASE,
    find_profile,
    known_releases,
)
from mla_decode_rocm_aiter.resolve import resolve

__all__ = [
    "DEFAULT_RELEASE",
    "PINNED_RELEASE",
    "KernelKey",
    "find_profile",
    "known_releases",
    "resolve",
]
