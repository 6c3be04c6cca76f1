"""What may go wrong in a simulated AITER, each thing by a switch of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AbortMode = Literal["native", "raise"]
"""`native` ends the process as AITER does; `raise` raises `SimulatedAbort`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The first four are AITER's own and on; the others are mutants and off."""

    empty_row_nan: bool = True
    """A row without a key gets NaN, and +inf or NaN as its LSE."""
    nan_workspace: bool = True
    """Partial buffers hold NaN until a kernel writes them, and so does an output that
    no work item names."""
    equal_rows: bool = True
    """Without a schedule, blocks whose length is no power of two give every token the
    first one's answer."""
    unmasked_tie: bool = True
    """Of two kernels with one key, the build took the one that does not mask."""
    ignores_causal: bool = False
    """The kernel masks although it was asked not to."""
    broken_fp8_fold_32: bool = False
    """fp8 blocks of 32 heads come back with their heads exchanged."""
    rounds_weights: bool = False
    """fp8 queries: softmax weights are rounded to fp8 before the second product."""


class SimulatedAbort(RuntimeError):  # noqa: N818 - it stands for an abort, not an error
    """Where AITER would have ended the process (`AITER_CHECK` without a bridge)."""


class SimulatedMemoryFault(RuntimeError):  # noqa: N818 - it stands for a GPU fault
    """Where AITER would have read or written outside of a buffer."""
