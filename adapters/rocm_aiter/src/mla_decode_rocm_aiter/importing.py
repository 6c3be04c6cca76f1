"""Import AITER, with every way in which that fails as a refusal of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mla_decode import Refusal, RefusalCode

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.installation import Installation

Decode = Callable[..., Any]


def import_decode(installation: Installation | None) -> Decode | Refusal:
    """`aiter.mla.mla_decode_fwd`, or why it cannot be had.

    Args:
        installation: Where AITER lies; its running builds are looked at before an
            import that would wait for them. None for a module that is simulated.
    """
    if installation is not None and "aiter" not in sys.modules:
        locks = installation.build_locks()
        if locks:
            return build_in_progress(str(locks[0]))
    try:
        module = importlib.import_module("aiter.mla")
    except Exception as error:  # noqa: BLE001 - whatever a foreign import raises is the refusal's text
        return import_failed(error)
    decode: Decode | None = getattr(module, "mla_decode_fwd", None)
    if not callable(decode):
        return Refusal(
            code=RefusalCode.IMPORT,
            message="AITER was imported without its MLA decode",
            got="aiter.mla has no mla_decode_fwd",
            allowed="aiter.mla.mla_decode_fwd",
            fix="look for the first warning of `python -c 'import aiter'`: AITER "
            "swallows failures of single imports",
        )
    return decode


def import_failed(error: BaseException) -> Refusal:
    """An import that raised: a build that another process runs, or a broken install."""
    text = f"{type(error).__name__}: {error}"
    if "aiter.jit" in text and isinstance(error, ModuleNotFoundError):
        return build_in_progress(text)
    return Refusal(
        code=RefusalCode.IMPORT,
        message="importing AITER failed",
        got=text,
        allowed="an AITER that imports on this machine",
        fix="run `python -c 'import aiter.mla'` and repair what it names (ROCm, the "
        "compiler's libstdc++, torch); triton_mla decodes without AITER",
    )


def build_in_progress(got: str) -> Refusal:
    """AITER compiles on first use; an import now would wait or meet half a module."""
    return Refusal(
        code=RefusalCode.FEATURE,
        message="AITER's kernels are being compiled by another process",
        got=got,
        allowed="no build in progress",
        fix="wait for the build and ask again; if no build runs, a killed one left its "
        "lock: delete it",
    )
