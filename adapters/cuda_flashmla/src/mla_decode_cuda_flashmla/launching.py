"""The finishing kernel's launches: past Triton's front door, which costs more than they.

At every launch Triton asks for device and stream, makes a description for hooks that
nobody set, and calls those. None of it differs between two launches of a grid but the
stream: what Triton's launcher passes to the driver is taken from it once.
"""

from __future__ import annotations

import copy
import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Launch = Callable[[int, int, int, int, int], object]
    """Takes the current stream and four addresses: LSE from and to, out from and to."""
    Grid = tuple[int, int, int]
    Constants = tuple[int, bool, int]
    """The kernel's last three arguments."""
    Passed = tuple[Any, ...]
    """What a launcher passes between the stream and the kernel's arguments."""
    Direct = Callable[[Callable[..., object], Grid, Passed, Constants], Launch]

_LAUNCH = "self", "gridX", "gridY", "gridZ", "stream", "function"
_HOOKS = "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"
_CALLS = (*_LAUNCH, "args"), (*_LAUNCH, *_HOOKS, "args")
"""Parameters of a launcher's call: 3.6 leaves among `args` what 3.9 names."""


class Launcher:
    """A loaded kernel's way to the driver: straight where its launcher is a known one.

    Args:
        compiled: Triton's, loaded on the device that it will run on: of four pointers
            and three numbers.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._parts = _take_apart(compiled)

    @property
    def is_direct(self) -> bool:
        """Whether launches go straight to the driver while nobody listens to them."""
        return self._parts is not None

    def by_triton(self, grid: Grid, constants: Constants) -> Launch:
        """A grid's launch as Triton makes it, which tells a profiler's hooks of it."""
        run = self._compiled[grid]
        return lambda _stream, *addresses: run(*addresses, *constants)

    def directly(self, grid: Grid, constants: Constants) -> Launch:
        """The same, straight to the driver where that is known; no hook hears of it."""
        if self._parts is None:
            return self.by_triton(grid, constants)
        passed, direct = self._parts
        return direct(self._compiled.run.launch, grid, passed, constants)


def hooks_are_set() -> bool:
    """Whether a profiler wants to hear of launches: Triton's own way tells it."""
    runtime = _runtime_knobs()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A chain of none is no hook; what is no chain is one, unless it is None.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@lru_cache(maxsize=1)
def _runtime_knobs() -> Any:
    from triton import knobs  # noqa: PLC0415 - optional: imported with the first kernel

    return knobs.runtime


def _take_apart(compiled: Any) -> tuple[Passed, Direct] | None:
    """What a launcher passes to the driver, and who passes it in its stead.

    Returns:
        None where the launcher is not made as 3.6's and 3.9's are, or has more to do at
        a launch: then Triton's own way is the only one.
    """
    try:
        return _parts_of(compiled)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None  # a launcher of another making, which would not show what it does


def _parts_of(compiled: Any) -> tuple[Passed, Direct] | None:
    from triton.backends.nvidia import driver  # noqa: PLC0415 - where there is a GPU

    launcher: Any = getattr(compiled, "run", None)
    kind = driver.CudaLauncher
    if type(launcher) is not kind or _parameters(kind.__call__) not in _CALLS:
        return None
    scratch = "global_scratch_size", "profile_scratch_size"
    if any(getattr(launcher, name, None) != 0 for name in scratch):
        return None
    if getattr(launcher, "gsan_enabled", False):
        return None
    return _show(launcher, compiled)


def _show(launcher: Any, compiled: Any) -> tuple[Passed, Direct] | None:
    """Call the launcher beside the driver: it shows what it passes."""
    shown: list[tuple[Any, ...]] = []
    showing = copy.copy(launcher)
    showing.launch = lambda *given: shown.append(given)
    stream, argument = object(), object()
    kernel = compiled.function, compiled.packed_metadata
    showing(1, 1, 1, stream, *kernel, None, None, None, argument)
    if len(shown) != 1 or shown[0][:4] != (1, 1, 1, stream):
        return None
    *passing, last = shown[0][4:]
    passed = tuple(passing)
    if last is argument and len(passed) == _NUM_PASSED_APART:
        return passed, _arguments_apart
    if last == (argument,) and len(passed) == _NUM_PASSED_WITH_ONE:
        return passed, _arguments_as_one
    return None


# The two below spell a launch out: unpacking tuples into it takes twice as long.

_NUM_PASSED_APART = 9


def _arguments_apart(
    launch: Callable[..., object], grid: Grid, passed: Passed, constants: Constants
) -> Launch:
    """3.6's: the kernel's arguments follow one by one."""
    x, y, z = grid
    a, b, c, d, e, f, g, h, i = passed
    num_rows, copies, block = constants
    # fmt: off
    return lambda stream, lse_from, lse_to, out_from, out_to: launch(
        x, y, z, stream, a, b, c, d, e, f, g, h, i,
        lse_from, lse_to, out_from, out_to, num_rows, copies, block,
    )
    # fmt: on


_NUM_PASSED_WITH_ONE = 11


def _arguments_as_one(
    launch: Callable[..., object], grid: Grid, passed: Passed, constants: Constants
) -> Launch:
    """3.9's: the kernel's arguments are one tuple."""
    x, y, z = grid
    a, b, c, d, e, f, g, h, i, j, k = passed
    num_rows, copies, block = constants
    # fmt: off
    return lambda stream, lse_from, lse_to, out_from, out_to: launch(
        x, y, z, stream, a, b, c, d, e, f, g, h, i, j, k,
        (lse_from, lse_to, out_from, out_to, num_rows, copies, block),
    )
    # fmt: on


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
