"""Loading the kernels: compiled for a GPU, or interpreted on the CPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KERNELS = Path(__file__).parent / "kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The two kernels, bound to a way of running them."""

    decode: Any
    merge: Any
    interpreted: bool


@functools.cache
def load_kernels(*, interpreted: bool) -> Kernels:
    """Import the kernels for one way of running them.

    Triton decides when a function is decorated whether it will be interpreted, and such
    functions call none of the other kind. The interpreted kernels are therefore a
    package of their own, imported while that switch is on; the compiled ones, and the
    process's environment, stay as they are.
    """
    import triton  # noqa: PLC0415 - only those who launch need Triton

    package = f"{__package__}.{'interpreted_' * interpreted}kernels"
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        if interpreted:
            _load_again(package)
        decode = importlib.import_module(f"{package}.decode")
        merge = importlib.import_module(f"{package}.merge")
    return Kernels(
        decode=decode.decode_kernel, merge=merge.merge_kernel, interpreted=interpreted
    )


def _load_again(name: str) -> None:
    """Make the package of the kernels once more, by another name."""
    spec = importlib.util.spec_from_file_location(
        name, _KERNELS / "__init__.py", submodule_search_locations=[str(_KERNELS)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no kernels in {_KERNELS}", name=name)
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
