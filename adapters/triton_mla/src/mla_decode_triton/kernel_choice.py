"""Which of the two kernels serves: one for all problems, or for each the one that can."""

from __future__ import annotations

import os

from mla_decode.errors import ArgumentError
from mla_decode_triton.auto import AutoTritonBackend
from mla_decode_triton.backend import TritonMLABackend
from mla_decode_triton.hopper.backend import HopperMLABackend

VARIABLE = "MLA_DECODE_TRITON_KERNEL"
"""Read once, when `mla_decode_triton` is imported."""

BACKENDS: dict[str, type[TritonMLABackend]] = {
    "portable": TritonMLABackend,
    "hopper": HopperMLABackend,
    "auto": AutoTritonBackend,
}
DEFAULT_KERNEL = "auto"
"""Where nothing is said. Elsewhere than on Hopper that is the portable kernel."""


def chosen_backend(kernel: str | None = None) -> TritonMLABackend:
    """The backend over one of the kernels, or over both.

    Args:
        kernel: ``portable``, ``hopper``, or ``auto``: the Hopper one wherever it
            serves, the portable one elsewhere. None: what the environment says, and
            `DEFAULT_KERNEL` where it says nothing.

    Raises:
        ArgumentError: No kernel has that name.
    """
    if kernel is None:
        kernel = os.environ.get(VARIABLE, "").strip() or DEFAULT_KERNEL
    made = BACKENDS.get(kernel)
    if made is None:
        raise ArgumentError(
            "There is no Triton kernel of this name.",
            got=repr(kernel),
            allowed=", ".join(BACKENDS),
            fix=f"set {VARIABLE} to one of them, or unset it",
        )
    return made()
