"""How the library fails: exceptions, illegal accesses, and the end of the process."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

_RAISES: ContextVar[bool] = ContextVar("flashmla_simulator_raises", default=False)


class ProcessExit(RuntimeError):  # noqa: N818 - names what happened to the process
    """Where the library would have called ``exit(1)``."""


class IllegalAccess(RuntimeError):  # noqa: N818 - the driver's own word for it
    """Where the kernel would have read memory that is not its own."""


@contextmanager
def raising_exits() -> Iterator[None]:
    """Raise `ProcessExit` instead of ending the process, within the block."""
    token = _RAISES.set(True)
    try:
        yield
    finally:
        _RAISES.reset(token)


def host_check(holds: bool, message: str) -> None:
    """A check that the library turns into a Python exception."""
    if not holds:
        raise RuntimeError(message)


def host_assertion(holds: bool, condition: str) -> None:
    """A check whose failure ends the process with status 1."""
    if not holds:
        _end_process(f"Assertion failed (simulated): {condition}")


def driver_call(works: bool, message: str) -> None:
    """A driver call whose failure ends the process with status 1."""
    if not works:
        _end_process(f"CUDA error (simulated): {message}")


def _end_process(message: str) -> NoReturn:
    if _RAISES.get():
        raise ProcessExit(message)
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(1)
