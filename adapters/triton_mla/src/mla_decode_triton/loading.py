"""Loading the kernels: compiled for a GPU, or interpreted on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

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

    Triton decides when a function is decorated whether it will be interpreted. The
    interpreted kernels are therefore modules of their own, executed while that switch
    is on; the compiled ones, and the process's environment, stay as they are.
    """
    import triton  # noqa: PLC0415 - only those who launch need Triton

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        decode = _load("decode", interpreted=interpreted)
        merge = _load("merge", interpreted=interpreted)
    return Kernels(
        decode=decode.decode_kernel, merge=merge.merge_kernel, interpreted=interpreted
    )


def _load(name: str, *, interpreted: bool) -> ModuleType:
    package = f"{__package__}.kernels"
    full_name = f"{package}.{'interpreted_' * interpreted}{name}"
    spec = importlib.util.spec_from_file_location(full_name, _KERNELS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"no kernel module {name!r} in {_KERNELS}", name=full_name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    return module
