"""Which form a module of the library must be called in, by what the module offers.

Several distributions carry the same kernels under the same module name, and the newest
upstream release carries none of them. What counts is the functions and their
parameters, never a version string.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_decode.refusal import Refusal, RefusalCode
from mla_decode_cuda_flashmla.forms import (
    DenseDecode,
    Fp8Form,
    SchedMetaForm,
    TileMetadataForm,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

VLLM_OPS = "vllm.v1.attention.ops.flashmla"
"""vLLM's wrappers of its fp8 extension."""
DISTRIBUTIONS = ("tokenspeed-flashmla", "sgl-flash-mla", "flash-mla", "vllm")
"""Distributions known to ship one of the modules."""

INSTALL = (
    "pip install tokenspeed-flashmla==1.0.0.post20260429 (bf16 and fp16), or "
    "sgl-flash-mla==1.0.0 (fp8 too), or use a vLLM build that has vllm._flashmla_C; "
    "upstream FlashMLA's release of 2026-09-30 removed dense decode on Hopper, and "
    "flash-mla on PyPI is an sdist that does not build"
)

_DECODE_PARAMETERS = frozenset(
    {
        "q",
        "k_cache",
        "block_table",
        "cache_seqlens",
        "head_dim_v",
        "tile_scheduler_metadata",
        "num_splits",
        "softmax_scale",
        "causal",
    }
)
_ROWS_PARAMETERS = ("num_q_tokens_per_head_k", "num_heads_per_head_k")
_SINCE_REMOVAL = "enable_batch_invariant"
"""A parameter that the decode call has since dense decode was removed from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An installed copy of the kernels that this adapter can call."""

    module: str
    """The module that was imported."""
    distribution: str
    """Who ships it, or ``unknown``."""
    version: str
    dense: DenseDecode
    """Serves bf16 and fp16."""
    fp8: DenseDecode | None = None
    """Serves fp8 query and cache; None where the provider has no such kernel."""

    def decode_for(self, q_dtype: str) -> DenseDecode | None:
        """The form that serves a query dtype, None where nothing does."""
        return self.fp8 if q_dtype == "fp8" else self.dense


class LibraryRefused(Exception):  # noqa: N818 - an outcome with a refusal, not a fault
    """No callable copy; carries the refusal that says why and what to do."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def inspect_module(module: ModuleType | Any) -> Library:
    """Find the form of a module by the functions that it offers.

    Raises:
        LibraryRefused: The module has no dense decode that is known how to call.
    """
    plan = getattr(module, "get_mla_metadata", None)
    run = getattr(module, "flash_mla_with_kvcache", None)
    if plan is None or run is None:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise LibraryRefused(
            _unknown(module, "functions " + ", ".join(sorted(public)[:20]))
        )
    planned, ran = _parameters(plan), _parameters(run)
    missing = sorted(_DECODE_PARAMETERS - set(ran))
    if missing:
        raise LibraryRefused(
            _unknown(module, f"flash_mla_with_kvcache({', '.join(ran)})")
        )
    distribution, version = _provider(module)
    return Library(
        module=module.__name__,
        distribution=distribution,
        version=version,
        dense=_dense_form(module, planned, ran),
        fp8=_fp8_form(module, ran),
    )


def _dense_form(
    module: Any, planned: Mapping[str, inspect.Parameter], ran: Mapping[str, Any]
) -> DenseDecode:
    plan, run = module.get_mla_metadata, module.flash_mla_with_kvcache
    kinds = {parameter.kind for parameter in planned.values()}
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if kinds <= variadic:
        if "use_legacy" in ran and _has_legacy(module):
            extra = {"use_legacy": True, "is_fp8_kvcache": False}
        elif "use_legacy" in ran or _SINCE_REMOVAL in ran:
            raise LibraryRefused(
                library_refusal(
                    RefusalCode.IMPORT,
                    "This FlashMLA has no dense decode for Hopper",
                    f"{module.__name__} with {_SINCE_REMOVAL} (2026-09-30 or newer)",
                    "a copy that kept the kernels",
                )
            )
        else:
            extra = {}
        return SchedMetaForm(new_schedule=lambda: plan()[0], run=run, extra=extra)
    for name in _ROWS_PARAMETERS:
        if {"cache_seqlens", name, "num_heads_k"} <= set(planned):
            return TileMetadataForm(new_schedule=plan, rows_parameter=name, run=run)
    raise LibraryRefused(_unknown(module, f"get_mla_metadata({', '.join(planned)})"))


def _fp8_form(module: Any, ran: Mapping[str, Any]) -> DenseDecode | None:
    """The provider's dense fp8, None where it has none."""
    if "descale_q" in ran and "use_legacy" in ran and _has_legacy(module):
        return _sgl_fp8(module)
    if module.__name__.startswith("vllm.") and is_present(VLLM_OPS):
        ops = import_library(VLLM_OPS)
        return Fp8Form(
            new_schedule=lambda seq_lens, rows: ops.get_mla_metadata_dense_fp8(
                cache_seqlens=seq_lens, num_q_tokens_per_head_k=rows, num_heads_k=1
            ),
            run=ops.flash_mla_with_kvcache_fp8,
            wrap_schedule=lambda tiles, splits: {
                "tile_scheduler_metadata": tiles,
                "num_splits": splits,
            },
        )
    return None


def _has_legacy(module: Any) -> bool:
    return hasattr(module, "has_legacy") and bool(module.has_legacy())


def _sgl_fp8(module: Any) -> DenseDecode:
    new_object = module.get_mla_metadata

    def wrap(tiles: Any, splits: Any) -> dict[str, Any]:
        schedule = new_object()[0]
        schedule.tile_scheduler_metadata, schedule.num_splits = tiles, splits
        return {
            "tile_scheduler_metadata": schedule,
            "is_fp8_kvcache": True,
            "use_legacy": True,
        }

    return Fp8Form(
        new_schedule=lambda seq_lens, rows: module.get_mla_decoding_metadata(
            seqlens_k=seq_lens,
            num_q_tokens_per_head_k=rows,
            h_k=1,
            is_fp8_kvcache=True,
            use_legacy=True,
        ),
        run=module.flash_mla_with_kvcache,
        wrap_schedule=wrap,
    )


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def is_present(name: str) -> bool:
    """Whether a module can be found, without importing it (its parents are)."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is not installed
        return False


def import_library(name: str) -> ModuleType:
    """Import a module of the library.

    Raises:
        LibraryRefused: The import fails, for whatever reason it does.
    """
    try:
        return import_module(name)
    except Exception as error:
        raise LibraryRefused(
            library_refusal(
                RefusalCode.IMPORT,
                "The installed FlashMLA cannot be imported",
                f"{name}: {type(error).__name__}: {error}",
                "a build for this torch, CUDA and Python",
            )
        ) from error


def _provider(module: Any) -> tuple[str, str]:
    """The distribution that ships the module, and its version.

    Two may claim the name: the one that lies where the module was loaded from does.
    """
    where = Path(getattr(module, "__file__", None) or "").resolve()
    top = module.__name__.partition(".")[0]
    for name in _owners(tuple(sys.path)).get(top, ()):
        distribution = metadata.distribution(name)
        if Path(str(distribution.locate_file(""))).resolve() in where.parents:
            return name, distribution.version
    return "unknown", str(getattr(module, "__version__", "unknown"))


@cache
def _owners(_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Which distributions ship a package; every file of the path is walked, so once."""
    return metadata.packages_distributions()


def _unknown(module: Any, found: str) -> Refusal:
    return library_refusal(
        RefusalCode.IMPORT,
        "This FlashMLA offers no call that the adapter knows",
        f"{module.__name__}: {found}",
        "get_mla_metadata() or get_mla_metadata(cache_seqlens, "
        f"{' | '.join(_ROWS_PARAMETERS)}, num_heads_k), and flash_mla_with_kvcache("
        f"{', '.join(sorted(_DECODE_PARAMETERS))})",
    )


def library_refusal(code: RefusalCode, message: str, got: str, allowed: str) -> Refusal:
    """A refusal whose fix names the distributions that can be installed."""
    return Refusal(code=code, message=message, got=got, allowed=allowed, fix=INSTALL)
