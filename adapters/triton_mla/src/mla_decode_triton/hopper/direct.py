"""Launches: through Triton's front door once, straight to the driver afterwards.

Triton looks at every argument of every call to find the variant of a kernel that it may
use, which takes longer on the host than many steps do on the device. Here the variant of
aligned tensors is held: a call looks at their addresses and hands them over, with the
boxes as they were encoded for the driver at their first launch. What is not aligned takes
Triton's way, which compiles a variant for it; but a kernel makes no demand of what is
read or written a number at a time, as tables and lengths are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_decode_triton.hopper.compat import DriverRun, driver_run, hooks_are_set

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from mla_decode_triton.hopper.boxes import Boxed

ALIGNMENT = 16
"""What the addresses of a held variant are multiples of."""


class Directly(NamedTuple):
    """A variant's launch past the front door, for who puts its arguments together."""

    launch: Callable[[tuple[int, int, int], tuple[Any, ...]], None]
    """Of a grid and all arguments: encoded boxes, addresses, numbers, `values`. It is
    not to be called while `hooks_are_set`."""
    values: tuple[Any, ...]
    """Of the constants."""


@dataclass(slots=True, kw_only=True, eq=False)
class Variant:
    """A kernel for one device, one set of constants, and tensors of the same types.

    The kernel's parameters are the boxes, the tensors, the numbers and the constants of
    a launch, in this order.
    """

    kernel: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    """The compiler's."""
    compiled: Any = field(init=False, default=None)
    """Triton's, for aligned tensors; None until they have been launched once."""
    _values: tuple[Any, ...] = field(init=False, default=())
    """Of the constants, in the kernel's order: a direct launch passes them over."""
    _demanding: tuple[int, ...] | None = field(init=False, default=None)
    """Which addresses the kernel wants aligned; None until there are some."""
    _num_boxes: int = field(init=False, default=0)
    _driver_run: DriverRun | None = field(init=False, default=None)
    """The launch that takes encoded boxes; None where the release's is another one."""

    def launch(
        self,
        grid: tuple[int, int, int],
        boxes: Sequence[Boxed],
        tensors: Sequence[Tensor],
        addresses: Sequence[int],
        numbers: Sequence[float],
    ) -> None:
        """Launch the kernel on the current stream.

        Args:
            grid: Programs.
            boxes: What the copy engine reads, of the same forms each time.
            tensors: Of which the kernel gets the address, of the same dtypes each time.
            addresses: Theirs: the caller knows those that never move.
            numbers: Integers that fit 32 bits and that the kernel does not specialise;
                floats.
        """
        demanding = self._demanding
        if demanding is None:
            demanding = self._demanding = self._find_demanding(
                len(boxes), len(addresses)
            )
        bits = 0
        for index in demanding:
            bits |= addresses[index]
        compiled, direct = self.compiled, self._driver_run
        if bits % ALIGNMENT:
            self._launch_by_front_door(grid, boxes, tensors, numbers)
        elif compiled is None:
            found = self._launch_by_front_door(grid, boxes, tensors, numbers)
            self._hold(found, len(boxes))
        elif direct is None or hooks_are_set():
            compiled[grid](*boxes, *addresses, *numbers, *self._values)
        else:
            encoded: list[Any] = []
            for index, box in enumerate(boxes):
                if box.encoded is None:
                    box.encoded = direct.encode(index, box)
                encoded += box.encoded
            direct.launch(grid, (*encoded, *addresses, *numbers, *self._values))

    def directly(self, *anywhere: str) -> Directly | None:
        """The launch that takes encoded boxes, for who puts its arguments together.

        Args:
            anywhere: Tensors whose addresses the caller will not look at. All others it
                must know to be multiples of `ALIGNMENT`.

        Returns:
            None before aligned tensors were launched, where the release has no such
            launch, and where the kernel demands something of `anywhere`.
        """
        run, demanding = self._driver_run, self._demanding
        if run is None or demanding is None:
            return None
        names = self.kernel.arg_names[self._num_boxes :]
        if any(names[index] in anywhere for index in demanding):
            return None
        return Directly(run.launch, self._values)

    def _find_demanding(self, num_boxes: int, num_addresses: int) -> tuple[int, ...]:
        """Tensors that the compiler may know the alignment of: all, if it cannot tell."""
        everything = tuple(range(num_addresses))
        parameters = getattr(self.kernel, "params", None)
        if parameters is None:  # interpreted: nothing is compiled
            return everything
        free = [p.do_not_specialize_on_alignment for p in parameters[num_boxes:]]
        return tuple(index for index in everything if not free[index])

    def _launch_by_front_door(
        self,
        grid: tuple[int, int, int],
        boxes: Sequence[Boxed],
        tensors: Sequence[Tensor],
        numbers: Sequence[float],
    ) -> Any:
        described = [box.described() for box in boxes]
        return self.kernel[grid](
            *described, *tensors, *numbers, **self.constants, **self.options
        )

    def _hold(self, compiled: Any, num_boxes: int) -> None:
        """Launch aligned tensors directly from now on, if it was Triton that ran."""
        if compiled is not None:
            names = self.kernel.arg_names[-len(self.constants) :]
            self._values = tuple(self.constants[name] for name in names)
            self.compiled = compiled
            self._num_boxes = num_boxes
            self._driver_run = driver_run(compiled, num_boxes)
