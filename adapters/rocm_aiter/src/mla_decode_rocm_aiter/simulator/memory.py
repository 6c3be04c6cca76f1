"""Tensors by address: a kernel that is handed a pointer finds what lies there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from mla_decode_rocm_aiter.simulator.faults import SimulatedMemoryFault

if TYPE_CHECKING:
    from torch import Tensor


class AddressBook:
    """Remembers tensors by their address for as long as somebody owns them."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Tensor]] = {}

    def note(self, tensor: Tensor) -> int:
        """Remember a tensor, and return its address."""
        address = tensor.data_ptr()
        self._known[address] = weakref.ref(tensor)
        return address

    def read(self, address: int, what: str) -> Tensor:
        """The tensor at an address.

        Raises:
            SimulatedMemoryFault: Nobody owns it any more, or nothing was ever there.
        """
        found = self._known.get(address, lambda: None)()
        if found is None or found.data_ptr() != address:
            raise SimulatedMemoryFault(
                f"the kernel was given the address {address:#x} of {what}, where no "
                "buffer lives: keep the schedule's buffers for as long as it is used"
            )
        return found
