"""Which graph capture a call is part of: a schedule must not leak from one to another.

A schedule that was planned outside a graph holds the lengths of that moment; a replay
after a later build would walk them. One that was planned in another graph is only as
fresh as that graph's last replay. So each capture plans its own, inside itself.
"""

from __future__ import annotations

import ctypes
from contextvars import ContextVar
from functools import lru_cache

import torch

EAGER = 0
"""The key of calls outside any capture; the driver's ids start at 1."""

SIMULATED: ContextVar[int] = ContextVar("simulated_capture", default=EAGER)
"""The simulated capture that this thread is in."""

_CU_STREAM_CAPTURE_STATUS_ACTIVE = 1


def current_capture() -> int:
    """The driver's id of the capture that the current stream is in, else `EAGER`.

    Raises:
        RuntimeError: The driver does not tell, which no supported driver does.
    """
    if not torch.cuda.is_current_stream_capturing():
        return EAGER
    status, identity = ctypes.c_int(), ctypes.c_uint64()
    stream = torch.cuda.current_stream().cuda_stream
    code = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream),
        ctypes.byref(status),
        ctypes.byref(identity),
        None,
        None,
        None,
    )
    if code or status.value != _CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise RuntimeError(
            f"cuStreamGetCaptureInfo_v2 returned {code}, status {status.value}, on a "
            "stream that torch calls capturing"
        )
    return identity.value


def simulated_capture() -> int:
    """What `current_capture` is on an assumed device."""
    return SIMULATED.get()


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
