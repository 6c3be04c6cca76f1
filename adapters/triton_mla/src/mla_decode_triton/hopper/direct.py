"""Launches: through Triton's front door once, straight to the driver afterwards.

Triton looks at every argument of every call to find the variant of a kernel that it may
use, which takes longer on the host than most steps do on the device. Here the variants
of aligned tensors are held: a call looks at types and alignment, and hands addresses to
the variant. What is not aligned takes Triton's way, which compiles a variant for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor

    from mla_decode_triton.hopper.boxes import Boxed

_ALIGNMENT = 16
"""What the addresses of held variants are multiples of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVariant:
    """A compiled kernel and the constants that it was compiled with."""

    compiled: Any
    """Triton's; it belongs to the device that was current at its first launch."""
    values: tuple[Any, ...]
    """Of the constants, in the kernel's order: a direct launch passes them over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """The variants that one device's launches have found, and the way to launch them."""

    held: dict[Hashable, HeldVariant] = field(default_factory=dict)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        boxes: Sequence[Boxed],
        tensors: Sequence[Tensor],
        numbers: Sequence[float],
        constants: Mapping[str, Any],
        **options: Any,
    ) -> None:
        """Launch a kernel on the current stream of the current device.

        Args:
            kernel: Compiled for what it is called with. Its parameters are the boxes,
                the tensors, the numbers and the constants, in this order.
            grid: Programs.
            boxes: What the copy engine reads.
            tensors: Of which the kernel gets the address.
            numbers: Integers that fit 32 bits and are not specialised; floats.
            constants: By name.
            **options: The compiler's; they are always the same for a kernel.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        for box in boxes:
            bits |= box.address
        key = (
            id(kernel),  # its own hash is that of its source
            *[box.form for box in boxes],
            *[tensor.dtype for tensor in tensors],
            *constants.values(),
        )
        is_aligned = not bits % _ALIGNMENT
        variant = self.held.get(key) if is_aligned else None
        if variant is not None:
            variant.compiled[grid](*boxes, *addresses, *numbers, *variant.values)
            return
        described = [box.described() for box in boxes]
        compiled = kernel[grid](*described, *tensors, *numbers, **constants, **options)
        if is_aligned and compiled is not None:  # None: it was not Triton that ran it
            names = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
            self.held[key] = HeldVariant(
                compiled=compiled, values=tuple(constants[name] for name in names)
            )
