"""Whether a caller allows exact rewrites, as the word of a command line."""

from __future__ import annotations

import enum


class LoweringPolicy(str, enum.Enum):
    """Whether exact rewrites are allowed."""

    REFUSE = "refuse"
    EXACT = "exact"
