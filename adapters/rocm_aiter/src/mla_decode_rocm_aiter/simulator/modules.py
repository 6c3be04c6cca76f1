"""The simulated `aiter` as modules that the import system finds."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from mla_decode_rocm_aiter.installation import SIMULATED
from mla_decode_rocm_aiter.simulator.decode import decode
from mla_decode_rocm_aiter.simulator.machine import Machine
from mla_decode_rocm_aiter.simulator.metadata import build_schedule, metadata_info
from mla_decode_rocm_aiter.simulator.signatures import (
    decode_parameters,
    info_parameters,
    metadata_parameters,
    with_signature,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode_rocm_aiter.simulator.faults import AbortMode, Faults


def make_modules(machine: Machine) -> dict[str, types.ModuleType]:
    """The module objects of a simulated AITER, by import name."""
    names = (
        "aiter",
        "aiter.mla",
        "aiter.dtypes",
        "aiter.ops",
        "aiter.ops.attention",
        "aiter.jit",
        "aiter.jit.utils",
        "aiter.jit.utils.chip_info",
    )
    modules = {name: _module(name) for name in names}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    release = Version(machine.profile.releases[0])
    decode_fwd = with_signature(
        decode_parameters(release),
        "mla_decode_fwd",
        functools.partial(decode, machine),
    )
    operators: dict[str, Any] = {
        "get_mla_metadata_v1": with_signature(
            metadata_parameters(release),
            "get_mla_metadata_v1",
            functools.partial(build_schedule, machine),
        ),
        "get_mla_metadata_info_v1": with_signature(
            info_parameters(release),
            "get_mla_metadata_info_v1",
            functools.partial(metadata_info, machine),
        ),
    }
    if release >= Version("0.1.16"):
        operators["get_mla_decode_fwd_max_splits"] = _max_splits(machine)
    root = modules["aiter"]
    for name, function in operators.items():
        setattr(root, name, function)
        setattr(modules["aiter.ops.attention"], name, function)
    setattr(modules["aiter.mla"], "mla_decode_fwd", decode_fwd)  # noqa: B010 - a module
    setattr(root, SIMULATED, (machine.arch, machine.release))
    setattr(root, "__mla_decode_machine__", machine)  # noqa: B010 - a module
    setattr(root, "__version__", machine.release)  # noqa: B010 - a module
    _fill_dtypes(modules["aiter.dtypes"], machine)
    chip = modules["aiter.jit.utils.chip_info"]
    for name in ("get_gfx", "get_gfx_runtime"):
        setattr(chip, name, lambda: machine.arch)
    setattr(chip, "get_cu_num", lambda: machine.cus)  # noqa: B010 - a module
    return modules


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    return module


def _max_splits(machine: Machine) -> Any:
    def get_mla_decode_fwd_max_splits(
        num_head_qo: int,
        max_seqlen_qo: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> int:
        del num_head_qo, max_seqlen_qo, q_dtype, kv_dtype
        return machine.cus

    return get_mla_decode_fwd_max_splits


def _fill_dtypes(module: types.ModuleType, machine: Machine) -> None:
    named = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "i32": torch.int32,
        "fp8": machine.fp8,
    }
    for name, dtype in named.items():
        setattr(module, name, dtype)


@contextlib.contextmanager
def simulated(
    arch: str = "gfx950",
    release: str = "0.1.20.post1",
    *,
    abort: AbortMode = "raise",
    faults: Faults | None = None,
    cus: int = 0,
) -> Iterator[Machine]:
    """Put a simulated AITER into `sys.modules`, and take it out again.

    Args:
        arch: `gfx942` or `gfx950`.
        release: An AITER release with a profile.
        abort: `native` ends the process where AITER does; `raise` raises.
        faults: What goes wrong; AITER's own faults by default.
        cus: Compute units; 0 takes the arch's own.

    Yields:
        The machine: its faults may be replaced and its launches read.
    """
    machine = Machine(arch=arch, release=release, abort=abort, cus=cus)
    if faults is not None:
        machine.faults = faults
    before = {name: sys.modules.pop(name) for name in _aiter_names()}
    sys.modules.update(make_modules(machine))
    try:
        yield machine
    finally:
        for name in _aiter_names():
            del sys.modules[name]
        sys.modules.update(before)


def _aiter_names() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "aiter"]


def install(machine: Machine) -> None:
    """Put a simulated AITER into `sys.modules` for the rest of the process.

    Raises:
        RuntimeError: A real AITER is imported already.
    """
    found = sys.modules.get("aiter")
    if found is not None and not hasattr(found, SIMULATED):
        raise RuntimeError("a real aiter is imported: start a new process to simulate")
    sys.modules.update(make_modules(machine))
