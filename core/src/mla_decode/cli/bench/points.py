"""What is timed: one batch by its lengths, and what came out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode.problem import ROW_WIDTH

if TYPE_CHECKING:
    from mla_decode.refusal import Refusal

ITEM_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What all points of a run share."""

    dtype: str = "bf16"
    """The query's."""
    kv_dtype: str = "bf16"
    """The cache's."""
    page_size: int = 64
    """Tokens a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One batch: a point of a grid, or one step of a trace."""

    num_heads: int
    query_len: int
    seq_lens: tuple[int, ...]
    """Keys of each request, the block's included."""
    causal: bool
    layout: Layout
    origin: str = "grid"
    """``grid``, ``verify`` or ``draft``."""

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.seq_lens)

    @property
    def mean_seq_len(self) -> int:
        """Keys of a request, on average."""
        return round(sum(self.seq_lens) / self.batch)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all requests' latents, each read once."""
        return sum(self.seq_lens) * ROW_WIDTH * ITEM_SIZE[self.layout.kv_dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One backend at one point."""

    backend: str
    evidence: str
    """What ran: ``hardware``, ``reference``, ``simulated``..."""
    point: Point
    lowering: str = ""
    """The plan's kind: native, fold, pad, split; empty where refused."""
    us: float | None = None
    """Median time of a call, in microseconds; None where it was refused."""
    flatten_us: float | None = None
    """Of the same backend over one row a token; None where that is the same call."""
    refusals: tuple[Refusal, ...] = ()
    """Every reason why it was refused."""

    @property
    def refused(self) -> tuple[str, ...]:
        """Codes of the reasons, each once."""
        return tuple(sorted({str(reason.code) for reason in self.refusals}))

    @property
    def kv_gb_s(self) -> float | None:
        """KV bytes, read once, over the time."""
        return None if self.us is None else self.point.kv_bytes / self.us / 1e3

    @property
    def speed_up(self) -> float | None:
        """The flatten's time over this one's."""
        if self.us is None or self.flatten_us is None:
            return None
        return self.flatten_us / self.us

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        point = self.point
        return {
            "backend": self.backend,
            "evidence": self.evidence,
            "origin": point.origin,
            "num_heads": point.num_heads,
            "query_len": point.query_len,
            "batch": point.batch,
            "seq_len": point.mean_seq_len,
            "causal": point.causal,
            "dtype": point.layout.dtype,
            "kv_dtype": point.layout.kv_dtype,
            "page_size": point.layout.page_size,
            "lowering": self.lowering,
            "us": self.us,
            "kv_gb_s": self.kv_gb_s,
            "flatten_us": self.flatten_us,
            "speed_up_over_flatten": self.speed_up,
            "refused": list(self.refused),
            "refusals": [reason.as_dict() for reason in self.refusals],
        }
