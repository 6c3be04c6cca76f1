"""AITER MLA decode on AMD gfx942 and gfx950 behind the mla-decode contract."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_decode_rocm_aiter.backend import AiterMLABackend, backend
from mla_decode_rocm_aiter.heads import (
    AITER_FP8_NON_CAUSAL_QLEN2_HEADS,
    AiterMLAHelper,
)
from mla_decode_rocm_aiter.keys import KernelKey
from mla_decode_rocm_aiter.profiles import (
    DEFAULT_RELEASE,
    PINNED_RELEASE,
    find_profile,
    known_releases,
)
from mla_decode_rocm_aiter.resolve import resolve

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.builder import AiterMLAMetadataBuilder
    from mla_decode_rocm_aiter.metadata import AiterMLAMetadata

__all__ = [
    "AITER_FP8_NON_CAUSAL_QLEN2_HEADS",
    "DEFAULT_RELEASE",
    "PINNED_RELEASE",
    "AiterMLABackend",
    "AiterMLAHelper",
    "AiterMLAMetadata",
    "AiterMLAMetadataBuilder",
    "KernelKey",
    "backend",
    "find_profile",
    "has_fp8_non_causal_qlen2_kernel",
    "known_releases",
    "resolve",
]

has_fp8_non_causal_qlen2_kernel = AiterMLAHelper.has_fp8_non_causal_qlen2_kernel

_LAZY = {
    "AiterMLAMetadata": "mla_decode_rocm_aiter.metadata",
    "AiterMLAMetadataBuilder": "mla_decode_rocm_aiter.builder",
}


def __getattr__(name: str) -> Any:
    """Names that need torch, loaded on first use."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
