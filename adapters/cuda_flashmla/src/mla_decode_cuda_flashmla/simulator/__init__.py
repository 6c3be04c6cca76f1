"""FlashMLA's Python API on a CPU: its checks, its schedules really run, its faults.

What it keeps of the library: a schedule is made in the first call (2026) or by a call of
its own (2025) and is bound to lengths that nothing checks later; a request without keys
gets lse = +inf, or an illegal access, by form; a failed host assertion ends the process.
What it leaves out: time, and the order in which the card adds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from mla_decode.refusal import Refusal, RefusalCode
from mla_decode_cuda_flashmla.inspection import Library, LibraryRefused, inspect_module
from mla_decode_cuda_flashmla.simulator import (
    sched_meta_api,
    sgl_api,
    tile_metadata_api,
)
from mla_decode_cuda_flashmla.simulator.faults import (
    IllegalAccess,
    ProcessExit,
    raising_exits,
)
from mla_decode_cuda_flashmla.simulator.graph import SimulatedGraph

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

__all__ = [
    "IllegalAccess",
    "ProcessExit",
    "SimulatedGraph",
    "library",
    "raising_exits",
]

_DEFAULT = {"sgl-flash-mla": "1.0.0"}
_FIRST_YEAR, _FIRST_SCHED_META = 2025, 2026


def library(libraries: Mapping[str, str]) -> Library:
    """The simulated library that stands for an assumed release.

    Args:
        libraries: Versions by distribution: ``{"flash-mla": "2025.4"}`` or
            ``"2026.4"`` for upstream's two forms, by date; ``{"sgl-flash-mla":
            "1.0.0"}`` for the copy that has fp8 too, which is the default.

    Raises:
        LibraryRefused: A release that is not modelled.
    """
    known = {"flash-mla", "sgl-flash-mla", "tokenspeed-flashmla"}
    named = {name: libraries[name] for name in libraries if name in known} or _DEFAULT
    name, version = next(iter(named.items()))
    module: ModuleType
    if name == "sgl-flash-mla":
        module = sgl_api
    elif name == "tokenspeed-flashmla" or _year(version) >= _FIRST_SCHED_META:
        module = sched_meta_api
    else:
        module = tile_metadata_api
    return _library_of(module, name, version)


@lru_cache(maxsize=16)
def _library_of(module: ModuleType, name: str, version: str) -> Library:
    """The inspected module under the assumed name; it never changes."""
    found = inspect_module(module)
    return replace(found, distribution=f"{name} (simulated)", version=version)


def _year(version: str) -> int:
    year = version.partition(".")[0]
    if not year.isdigit() or not _FIRST_YEAR <= int(year) <= _FIRST_SCHED_META:
        raise LibraryRefused(
            Refusal(
                code=RefusalCode.VERSION,
                message="This FlashMLA release is not modelled",
                got=version,
                allowed="2025.2 to 2026.4, by date",
                fix="assume 2026.4 (schedule object) or 2025.4 (tile metadata)",
            )
        )
    return int(year)
