"""The two masks of a decode block, and the many forms in which engines hand one over."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import numpy as np

from mla_decode.errors import MaskError

if TYPE_CHECKING:
    from torch import Tensor


class Mask(str, enum.Enum):
    """Which keys a query token of a block sees."""

    CAUSAL = "causal"
    """Token t of Q sees ``seq_len - Q + t + 1`` keys (tail-aligned)."""
    NON_CAUSAL = "non_causal"
    """Every token of the block sees all ``seq_len`` keys, its siblings included."""

    def __str__(self) -> str:
        """The value, so that messages read `causal` and not the member's name."""
        return self.value


_FIX = (
    "pass True for a causal batch or False for a block whose tokens see each other; a "
    "tree mask has no form here: verify each path as a chain"
)
_ALLOWED = "bool, numpy.bool_, or a uniform bool tensor on the CPU"


def normalise_causal(causal: bool | np.bool_ | Tensor) -> bool:
    """Turn an engine's causal flag into one Python bool, or refuse it.

    Args:
        causal: bool, numpy bool, or a CPU bool tensor (0-d, or any shape whose values
            are all equal). Never a device tensor: reading it would stop the stream.

    Returns:
        True for `Mask.CAUSAL`, False for `Mask.NON_CAUSAL`.

    Raises:
        MaskError: Any other type, a device tensor, an empty or a mixed tensor. Nothing
            is guessed: ``None`` and ``0`` are refused too.
    """
    if isinstance(causal, (bool, np.bool_)):
        return bool(causal)
    import torch  # noqa: PLC0415 - this module is imported where torch need not be

    if not isinstance(causal, torch.Tensor):
        raise MaskError(
            "The causal flag has a type that names no mask.",
            got=f"{type(causal).__name__} {causal!r}",
            allowed=_ALLOWED,
            fix=_FIX,
        )
    if causal.device.type != "cpu":
        raise _tensor_error(causal, "would need a host-device synchronisation to read")
    if causal.dtype != torch.bool:
        raise _tensor_error(causal, "is not of dtype bool")
    if causal.numel() == 0:
        raise _tensor_error(causal, "is empty")
    first = bool(causal.reshape(-1)[0])
    if not bool((causal == first).all()):
        raise _tensor_error(causal, "mixes both masks; one batch has one mask")
    return first


def _tensor_error(causal: Any, why: str) -> MaskError:
    return MaskError(
        f"The causal tensor {why}.",
        got=f"{causal.dtype} {tuple(causal.shape)} on {causal.device}",
        allowed=_ALLOWED,
        fix=_FIX,
    )
