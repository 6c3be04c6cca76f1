"""The vocabulary in which a release's dispatch facts are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

ANY = range(1, 1 << 30)
"""Every positive number."""


def at_least(minimum: int) -> range:
    """Every number from `minimum` on."""
    return range(minimum, ANY.stop)


def only(*numbers: int) -> frozenset[int]:
    """Just these numbers."""
    return frozenset(numbers)


BF16 = ("bf16", "bf16")
FP8 = ("fp8", "fp8")
MIXED = ("bf16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which calls a rule speaks of; what is left out admits everything."""

    arch: str | None = None
    """`gfx942` or `gfx950`."""
    dtypes: tuple[str, str] | None = None
    """Dtype of q and of the cache."""
    persistent: bool | None = None
    """Whether the call brings a schedule."""
    causal: bool | None = None
    """The mask of the call."""
    heads: Container[int] = ANY
    """Query heads, after folding."""
    q: Container[int] = ANY
    """Query tokens of one request."""
    rows: Container[int] = ANY
    """Heads times query tokens."""

    def fits(
        self, arch: str, dtypes: tuple[str, str], persistent: bool, causal: bool
    ) -> bool:
        """Whether the call's fixed properties fit, its shape aside."""
        return (
            self.arch in {None, arch}
            and self.dtypes in {None, dtypes}
            and self.persistent in {None, persistent}
            and self.causal in {None, causal}
        )

    def admits(self, heads: int, q: int) -> bool:
        """Whether the call's shape fits."""
        return heads in self.heads and q in self.q and heads * q in self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A head count without kernels of its own runs as several groups of fewer heads."""

    where: Where
    """The calls that fold, tested on the call's own heads and tokens."""
    to_heads: int
    """Heads of one group."""
    into_query: bool = False
    """Groups become further query tokens; otherwise they become further requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """How the C++ side names the kernel of a call; the first rule that fits decides."""

    where: Where
    """The calls that the rule names a kernel for."""
    gqa: int | None = None
    """Heads of the key; None keeps the call's."""
    qseqlen: int | None = None
    """Query tokens of the key; None keeps the call's."""
    persistent: bool | None = None
    """Persistence of the key; None keeps the call's."""
    causal: int | None = None
    """Causal column of the key, where the rule sets it by itself."""
    aborts: bool = False
    """The host code ends the process here, before it looks at the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one AITER release does with an MLA decode call, before any kernel runs."""

    releases: tuple[str, ...]
    """The releases that behave like this, the first one naming the profile."""
    evidence: str
    """`executed`: its own host code was compiled and run on a CPU, and agrees;
    `read`: translated from its source; `declared`: someone else says so."""
    source: str
    """Where the facts come from."""
    tables: dict[str, str]
    """Per arch, the packaged kernel table, by the release that first shipped it."""
    has_causal_argument: bool
    """Whether `mla_decode_fwd` takes `causal=` and the causal column means it."""
    lse_key_needs_schedule: bool
    """Whether a call without a schedule is looked up without the LSE column."""
    reduce_heads: frozenset[int]
    """Head counts that the persistent reduction is compiled for, after folding."""
    split_table_rows: frozenset[int]
    """Heads times tokens that the Python table of fp8 split sizes knows; a call
    without a schedule and outside of it is a KeyError."""
    native: tuple[Where, ...]
    """Persistent calls that run with the heads they have."""
    folds: tuple[Fold, ...]
    """Persistent calls that fold; a call that is neither is an assertion error."""
    keys: tuple[KeyRule, ...]
    """Names of kernels, first match first; without a match the call keeps its shape."""
    unloadable: frozenset[tuple[str, str]] = frozenset()
    """(arch, kernel) that are in the table and cannot be launched on the arch."""
    batch_gate: int | None = None
    """Batch size from which gfx950 bf16, 16 heads, one token silently drops its
    schedule when `num_kv_splits` is left out; None where no such gate exists."""
    parallel_planner: bool = False
    """Whether single-token schedules come from the planner that may give an empty
    request no work item."""
    experimental_breaks: bool = False
    """Whether AITER_ENABLE_EXPERIMENTAL=1 leads into an operator that is not there."""
    aborts: frozenset[str] = frozenset({"stage1"})
    """Which of `stage1`, `metadata`, `reduce` end the process rather than raise."""
