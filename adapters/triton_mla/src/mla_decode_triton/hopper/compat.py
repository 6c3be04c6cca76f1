"""What differs between the releases of Triton that the Hopper kernel is compiled on.

Gluon is experimental: names move between releases. Kernels take the names of this
module, which are those of the newest release; 3.6 is the oldest one supported. So does
what launches them: Triton's launchers are made differently too.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import (
    _unwrap_if_constexpr,
    builtin,
)
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core as _core

if TYPE_CHECKING:
    from collections.abc import Callable

aggregate: Any = getattr(gluon, "aggregate", None) or _core._aggregate  # noqa: SLF001 - 3.6 has no public name
"""Make a class a bundle of device values (3.6: a private name)."""

OLDEST = (3, 6)
"""The oldest Triton release that the kernel is compiled on."""

async_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Bulk copy of a box of a tensor descriptor into shared memory (3.6: another name)."""

barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait for all threads of the current partition (3.6: another name)."""


@builtin
def reinterpret(
    memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None
) -> Any:
    """View shared memory under another shape and layout (3.6: a private method)."""
    return _semantic.memdesc_reinterpret(
        memory,
        _unwrap_if_constexpr(dtype),
        [_unwrap_if_constexpr(size) for size in _unwrap_if_constexpr(shape)],
        _unwrap_if_constexpr(layout),
    )


@functools.cache
def triton_release() -> tuple[int, int]:
    """Major and minor number of the Triton that is imported."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


_LAUNCH = "self", "gridX", "gridY", "gridZ", "stream", "function"
_HOOKS = "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"
_LAUNCHES = (*_LAUNCH, "args"), (*_LAUNCH, *_HOOKS, "args")
"""Parameters of a launcher's call: 3.6 leaves among `args` what 3.9 names."""


class DriverRun(NamedTuple):
    """A compiled kernel's launch, of arguments in the form that the driver takes."""

    launch: Callable[[tuple[int, int, int], tuple[Any, ...]], None]
    """Launch a grid on the current stream of the kernel's device. A descriptor's place
    among the arguments is taken by what `encode` made of it. No hook hears of it."""
    encode: Callable[[int, Any], tuple[Any, ...]]
    """The driver's arguments for a descriptor, given its number among descriptors."""


def driver_run(compiled: Any, num_descriptors: int) -> DriverRun | None:
    """Take the launcher of a compiled kernel apart, which encodes descriptors each call.

    Returns:
        None where the launcher is not made as 3.6's and 3.9's are, or has more to do at
        a launch: then Triton's own way, `compiled[grid]`, is the only one.
    """
    try:
        return _take_apart(compiled, num_descriptors)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None  # a launcher of another making, which would not show what it does


def _take_apart(compiled: Any, num_descriptors: int) -> DriverRun | None:
    from triton.backends.nvidia import driver  # noqa: PLC0415 - where there is a GPU

    launcher: Any = getattr(compiled, "run", None)
    kind = driver.CudaLauncher
    if type(launcher) is not kind or _parameters(kind.__call__) not in _LAUNCHES:
        return None
    launch, encode = launcher.launch, _no_descriptor
    if num_descriptors:
        parts = _descriptor_parts(launch, driver.make_tensordesc_arg)
        forms = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        if parts is None or len(forms) != num_descriptors or None in forms:
            return None
        launch, make = parts

        def encode(index: int, box: Any) -> tuple[Any, ...]:
            return tuple(make(box, forms[index]))

    bound = _bind(launcher, compiled, launch)
    return None if bound is None else DriverRun(bound, encode)


def _descriptor_parts(
    wrapped: Any, make: Any
) -> tuple[Callable[..., None], Callable[[Any, Any], list[Any]]] | None:
    """The launch that takes encoded descriptors, and what encodes one."""
    if not inspect.isfunction(wrapped) or not inspect.isfunction(make):
        return None
    launch = inspect.getclosurevars(wrapped).nonlocals.get("launcher")
    spare = len(_parameters(make)) - 2
    if not callable(launch) or spare not in (0, 1):
        return None
    if spare:  # 3.9 passes the launch's other arguments, and reads none of them
        return launch, lambda box, form: make(box, form, ())
    return launch, make


def _bind(
    launcher: Any, compiled: Any, launch: Callable[..., None]
) -> Callable[[tuple[int, int, int], tuple[Any, ...]], None] | None:
    """Bind what a launcher passes besides grid, stream and arguments: it shows that."""
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if getattr(launcher, "gsan_enabled", False):
        return None
    shown: list[tuple[Any, ...]] = []
    showing = copy.copy(launcher)
    showing.launch = lambda *given: shown.append(given)
    stream, argument = object(), object()
    kernel = compiled.function, compiled.packed_metadata
    showing(1, 1, 1, stream, *kernel, None, None, None, argument)
    ((*leading, last),) = shown
    is_one = last == (argument,)
    if leading[:4] != [1, 1, 1, stream] or not (is_one or last is argument):
        return None
    rest = tuple(leading[4:])
    active = triton.runtime.driver.active
    stream_of, device = active.get_current_stream, active.get_current_device()

    def launch_spread(grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        launch(*grid, stream_of(device), *rest, *arguments)

    def launch_one(grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        launch(*grid, stream_of(device), *rest, arguments)

    return launch_one if is_one else launch_spread


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _no_descriptor(index: int, box: Any) -> tuple[Any, ...]:
    raise IndexError(f"the kernel has no descriptor {index}, for {box}")


def hooks_are_set() -> bool:
    """Whether a profiler wants to hear of launches: Triton's own way tells it."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A chain of none is no hook; what is no chain is one, unless it is None.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
