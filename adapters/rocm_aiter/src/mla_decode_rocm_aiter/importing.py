"""Import AITER, with every way in which that fails as a refusal of its own."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mla_decode import Refusal, RefusalCode

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.installation import Installation

Decode = Callable[..., Any]

PLANNERS = {
    "get_mla_metadata_info_v1": frozenset({"is_sparse", "fast_mode"}),
    "get_mla_metadata_v1": frozenset(
        {
            "page_size",
            "kv_granularity",
            "max_seqlen_qo",
            "uni_seqlen_qo",
            "fast_mode",
            "dtype_q",
            "dtype_kv",
        }
    ),
}
"""AITER's functions that plan, by the parameters that the adapter gives by keyword."""


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
    return decode if installation is None else _planners_missing() or decode


def _planners_missing() -> Refusal | None:
    """What the planners of an installed AITER lack of how the adapter calls them.

    A dtype that a planner cannot be told has no error of its own: the schedule would be
    one for other kernels.
    """
    root = importlib.import_module("aiter")
    absent = [name for name in PLANNERS if not callable(getattr(root, name, None))]
    if absent:
        return Refusal(
            code=RefusalCode.IMPORT,
            message="AITER was imported without the functions that plan a decode",
            got=f"aiter has no {', '.join(absent)}",
            allowed=", ".join(PLANNERS),
            fix="look for the first warning of `python -c 'import aiter'`: AITER "
            "swallows failures of single imports",
        )
    for name, wanted in PLANNERS.items():
        known = _keywords(getattr(root, name))
        if known is not None and not wanted <= known:
            return Refusal(
                code=RefusalCode.VERSION,
                message=f"the installed AITER's {name} cannot be called as the adapter "
                f"calls it: it takes no {', '.join(sorted(wanted - known))}",
                got=f"{name}({', '.join(sorted(known))})",
                allowed=f"the parameters {', '.join(sorted(wanted))}",
                fix="install an AITER from 0.1.10.post2 to a known release, upgrade "
                "mla-decode-rocm-aiter, or use triton_mla",
            )
    return None


def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names that a function takes by keyword; None where it takes any, or cannot say."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a compiled function
        return None
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    return frozenset(parameters)


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
