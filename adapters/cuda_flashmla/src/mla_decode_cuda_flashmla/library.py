"""The kernel library of a device: the installed copy, or the simulator."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from mla_decode.refusal import Refusal, RefusalCode
from mla_decode_cuda_flashmla.inspection import (
    DISTRIBUTIONS,
    Library,
    LibraryRefused,
    import_library,
    inspect_module,
    is_present,
    library_refusal,
)

if TYPE_CHECKING:
    from mla_decode.device import DeviceInfo

MODULES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
"""Where the kernels' Python interface is found, in the order in which it is looked for."""


def library_for(device: DeviceInfo) -> Library:
    """The library that serves a device: the simulator where the device is assumed.

    Raises:
        LibraryRefused: Nothing installed can be called.
    """
    if device.assumed:
        from mla_decode_cuda_flashmla.simulator import (  # noqa: PLC0415 - only for assumed devices
            library,
        )

        return library(device.libraries)
    return installed_library()


def installed_library() -> Library:
    """The installed copy.

    Raises:
        LibraryRefused: None is installed, or the one that is cannot be called.
    """
    found = look_up()
    if isinstance(found, Refusal):
        raise LibraryRefused(found)
    return found


@lru_cache(maxsize=1)
def look_up() -> Library | Refusal:
    """Import and inspect the installed library, once a process: a failure stays one."""
    try:
        for name in MODULES:
            if is_present(name):
                return inspect_module(import_library(name))
    except LibraryRefused as refused:
        return refused.refusal
    return library_refusal(
        RefusalCode.DEPENDENCY,
        "FlashMLA is not installed",
        "no module " + " or ".join(MODULES),
        "a distribution with Hopper dense decode: " + ", ".join(DISTRIBUTIONS),
    )
