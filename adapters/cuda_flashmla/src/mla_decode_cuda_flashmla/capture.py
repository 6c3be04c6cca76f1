"""Which graph capture a call is part of: a schedule must not leak from one to another.

A schedule that was planned outside a graph holds the lengths of that moment; a replay
after a later build would walk them. One that was planned in another graph is only as
fresh as that graph's last replay. So each capture plans its own, inside itself.
"""

from __future__ import annotations

import ctypes
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_decode.device import DeviceInfo

EAGER = 0
"""The key of calls outside any capture; the driver's ids start at 1."""

SIMULATED: ContextVar[int] = ContextVar("simulated_capture", default=EAGER)
"""The simulated capture that this thread is in."""

UNCAPTURABLE = 0
"""The driver's handle of the default stream, which it refuses to capture."""

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


def stream_getter(device: DeviceInfo) -> Callable[[int], int]:
    """What tells the handle of the stream that is current on a device, by its number.

    torch's object for a stream takes longer to make than a launch; the call that Triton
    uses does not make one.
    """
    if device.assumed:
        return lambda _number: UNCAPTURABLE + 1
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - as Triton does; else the public way
    if raw is not None:
        return cast("Callable[[int], int]", raw)
    return lambda number: int(torch.cuda.current_stream(number).cuda_stream)


def simulated_capture() -> int:
    """What `current_capture` is on an assumed device."""
    return SIMULATED.get()


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
