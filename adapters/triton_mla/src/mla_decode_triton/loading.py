"""Loading the kernels: compiled for a GPU, or interpreted on the CPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KERNELS = Path(__file__).parent / "kernels"
_ONE_AT_A_TIME = threading.Lock()
"""Triton's switch is the process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The two kernels, bound to a way of running them."""

    decode: Any
    merge: Any
    interpreted: bool


def load_kernels(*, interpreted: bool) -> Kernels:
    """Import the kernels for one way of running them, once.

    Triton decides when a function is decorated whether it will be interpreted, and such
    functions call none of the other kind. So each kind is a package of its own, executed
    while that switch is as it should be, whoever imported the kernels before; the
    process's environment stays as it is.
    """
    with _ONE_AT_A_TIME:
        return _load(interpreted=interpreted)


@functools.cache
def _load(*, interpreted: bool) -> Kernels:
    import triton  # noqa: PLC0415 - only those who launch need Triton

    package = f"{__package__}.{'interpreted_' * interpreted}kernels"
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        _make_package(package)
        decode = importlib.import_module(f"{package}.decode")
        merge = importlib.import_module(f"{package}.merge")
    return Kernels(
        decode=decode.decode_kernel, merge=merge.merge_kernel, interpreted=interpreted
    )


def _make_package(name: str) -> None:
    """Make the package of the kernels anew by a name, with no module in it yet."""
    for known in tuple(sys.modules):
        if known == name or known.startswith(f"{name}."):
            del sys.modules[known]
    spec = importlib.util.spec_from_file_location(
        name, _KERNELS / "__init__.py", submodule_search_locations=[str(_KERNELS)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no kernels in {_KERNELS}", name=name)
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
