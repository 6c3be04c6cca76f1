"""The clauses of the contract: what a case can check."""

from __future__ import annotations

import enum


class Clause(str, enum.Enum):
    """A clause by the name that the contract gives it."""

    BACKEND = "BACKEND"
    """The backend is a light object with the protocol's members."""
    BUILDER = "BUILDER"
    """`build` is final, the signature of `_build_decode` is frozen."""
    VERSION = "VERSION"
    """An adapter works with a core of its major and an equal or newer minor."""
    MASK = "MASK"
    BLOCK = "BLOCK"
    LENGTHS = "LENGTHS"
    SCALE = "SCALE"
    EMPTY = "EMPTY"
    LSE = "LSE"
    OUT = "OUT"
    READS = "READS"
    HEADS = "HEADS"
    DTYPE = "DTYPE"
    STALE = "STALE"
    STABLE = "STABLE"
    UBATCH = "UBATCH"
    SYNC = "SYNC"
    VALIDATE = "VALIDATE"
    REFUSE = "REFUSE"
    DCP = "DCP"
    REPEAT = "REPEAT"

    def __str__(self) -> str:
        """The clause's name, so that tables read `MASK` and not the member."""
        return self.value
