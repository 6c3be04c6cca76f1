"""What is tried: calls of AITER's own function, one shape at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADS = (16, 32, 48, 64, 80, 96, 112, 128)
LENGTHS = (1, 2, 3, 4, 5, 8)
DTYPES = (("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeShape:
    """One call, with a schedule and pages of one token, as the adapter makes it."""

    heads: int
    """Heads that AITER is given, a multiple of 16."""
    q: int
    """Query tokens per request."""
    q_dtype: str
    kv_dtype: str
    causal: bool
    lse: bool = False

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that a child process reads."""
        return asdict(self)

    def __str__(self) -> str:
        """The shape in words."""
        return (
            f"{self.heads} heads, {self.q} tokens, {self.q_dtype}/{self.kv_dtype}, "
            f"{'causal' if self.causal else 'non-causal'}{', lse' if self.lse else ''}"
        )


def all_shapes() -> Iterator[ProbeShape]:
    """The shapes that serving meets most: a child process for each."""
    for q_dtype, kv_dtype in DTYPES:
        for heads in HEADS:
            for q in LENGTHS:
                for causal in (True, False) if q > 1 else (True,):
                    for lse in (False, True):
                        yield ProbeShape(
                            heads=heads,
                            q=q,
                            q_dtype=q_dtype,
                            kv_dtype=kv_dtype,
                            causal=causal,
                            lse=lse,
                        )
