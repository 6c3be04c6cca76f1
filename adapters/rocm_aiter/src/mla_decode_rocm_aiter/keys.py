"""The key under which AITER looks a decode kernel up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKey:
    """The kernel that a call resolves to, named as the kernel table names it."""

    gqa: int
    """Heads of the kernel; several of its passes may serve one call."""
    qseqlen: int
    """Query tokens of the kernel; 0 stands for any."""
    causal: int
    """The table's causal column. Before 0.1.20 a kernel that masks has 0 here."""
    persistent: bool
    """Whether the kernel walks a schedule. On gfx942, bf16 with 128 heads resolves to a
    kernel that does not, although the call brings one."""
    lse: bool
    """Whether the lookup asked for a kernel that returns the log-sum-exp."""
    heads: int
    """Heads that one folded request has."""
    q: int
    """Query tokens that one folded request has."""
    fold: int
    """Folded requests, or folded token groups, that one request becomes."""
    q_per_call: int
    """Query tokens of the call; fewer than `q` where the fold makes groups tokens."""
    kernels: tuple[str, ...]
    """Names of every row with this key; with more than one the build decides."""
