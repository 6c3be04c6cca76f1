"""Which of the two kernels serves: the portable one, or on request the Hopper one."""

from __future__ import annotations

import os

from mla_decode.errors import ArgumentError
from mla_decode_triton.backend import TritonMLABackend
from mla_decode_triton.hopper.backend import HopperMLABackend

VARIABLE = "MLA_DECODE_TRITON_KERNEL"
"""Read once, when `mla_decode_triton` is imported."""

BACKENDS: dict[str, type[TritonMLABackend]] = {
    "portable": TritonMLABackend,
    "hopper": HopperMLABackend,
}
"""The first is the default, on Hopper too: the other one has never been timed."""


def chosen_backend(kernel: str | None = None) -> TritonMLABackend:
    """The backend over one of the kernels.

    Args:
        kernel: ``portable`` or ``hopper``; None: what the environment says, and the
            portable one where it says nothing.

    Raises:
        ArgumentError: No kernel has that name.
    """
    if kernel is None:
        kernel = os.environ.get(VARIABLE, "").strip() or next(iter(BACKENDS))
    made = BACKENDS.get(kernel)
    if made is None:
        raise ArgumentError(
            "There is no Triton kernel of this name.",
            got=repr(kernel),
            allowed=", ".join(BACKENDS),
            fix=f"set {VARIABLE} to one of them, or unset it",
        )
    return made()
