"""The decode problem: everything that decides whether a backend can serve a layer group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mla_decode.errors import ArgumentError
from mla_decode.mask import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator

LATENT_WIDTH = 512
"""C: `kv_lora_rank`, the latent width; the value is a cache row's first C numbers."""
ROPE_WIDTH = 64
"""R: the rotary part of a cache row."""
ROW_WIDTH = LATENT_WIDTH + ROPE_WIDTH
"""576: the width of a cache row and of an absorbed query."""

Q_DTYPES = ("bf16", "fp16", "fp32", "fp8")
KV_DTYPES = ("bf16", "fp16", "fp32", "fp8")
OUT_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dcp:
    """Decode context parallel: a request's KV is dealt round-robin over ranks."""

    world: int
    """Ranks that share one request's KV."""
    rank: int = 0
    """This rank."""
    interleave: int = 1
    """Consecutive tokens that one rank holds before the next rank's turn."""

    def __post_init__(self) -> None:
        """Refuse a group that cannot exist."""
        _positive("dcp.world", self.world)
        _positive("dcp.interleave", self.interleave)
        if type(self.rank) is not int or not 0 <= self.rank < self.world:
            raise ArgumentError(
                "dcp.rank is not a rank of the group.",
                got=repr(self.rank),
                allowed=f"0..{self.world - 1}",
                fix="pass this process's rank within its decode-context group",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProblem:
    """What a layer group asks of a backend, known when the engine starts.

    Every (query length, mask) that serving will use is named here, so that every
    refusal happens at construction and none in mid-serving.

    Raises:
        ArgumentError: A field that no decode problem can have.
    """

    num_q_heads: int
    """H: query heads on this rank; they share one KV head."""
    q_dtype: str = "bf16"
    """``bf16 fp16 fp32 fp8``; fp32 is served by the reference only."""
    kv_dtype: str = "bf16"
    """Of this layer group's cache, never of the run: ``bf16 fp16 fp32 fp8``."""
    out_dtype: str = "bf16"
    """``bf16 fp16 fp32``."""
    page_size: int = 64
    """Tokens a page."""
    query_lens: frozenset[int] = frozenset({1})
    """Q: every block length that serving will use."""
    masks: frozenset[Mask] = frozenset({Mask.CAUSAL})
    """Every mask that serving will use."""
    needs_lse: bool = False
    """Whether `forward` must return the log-sum-exp of each row."""
    dcp: Dcp | None = None
    """Set where a request's KV is dealt over ranks; implies `needs_lse`."""
    graphs: bool = False
    """Whether steps are captured in graphs and replayed after later builds."""
    kv_page_stride: int | None = None
    """Elements from one page's row 0 to the next's; None: pages lie back to back."""
    max_num_reqs: int = 256
    """Most requests of one batch, pads included."""
    max_model_len: int = 32768
    """Longest seq_len of a request, in tokens."""
    max_splits: int | None = None
    """Most pieces that a request's keys may be cut into; None: the backend's choice.
    Bounds the workspace of backends that split."""
    deterministic: bool = False
    """Whether the same call twice must give the same bits."""
    batch_invariant: bool = False
    """Whether a token's bits must not depend on what else is in the batch: neighbours,
    the number of requests, the other tokens of its block. Implies `deterministic`."""

    def __post_init__(self) -> None:
        """Normalise the sets and refuse what no decode problem can have."""
        for name in ("num_q_heads", "page_size", "max_num_reqs", "max_model_len"):
            _positive(name, getattr(self, name))
        _one_of("q_dtype", self.q_dtype, Q_DTYPES)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("out_dtype", self.out_dtype, OUT_DTYPES)
        self._normalise_sets()
        if self.max_splits is not None:
            _positive("max_splits", self.max_splits)
        for name in ("needs_lse", "graphs", "deterministic", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(
                    f"{name} is no bool.",
                    got=repr(getattr(self, name)),
                    allowed="True or False",
                    fix=f"pass {name} as a Python bool",
                )
        if self.batch_invariant:
            object.__setattr__(self, "deterministic", True)
        if self.dcp is not None:
            if not isinstance(self.dcp, Dcp):
                raise ArgumentError(
                    "dcp is no group of ranks.",
                    got=repr(self.dcp),
                    allowed="None, or mla_decode.Dcp",
                    fix="pass Dcp(world=..., rank=...), or leave it out",
                )
            object.__setattr__(self, "needs_lse", True)
        dense = self.page_size * ROW_WIDTH
        if self.kv_page_stride is not None and (
            type(self.kv_page_stride) is not int or self.kv_page_stride < dense
        ):
            raise ArgumentError(
                "kv_page_stride is shorter than a page.",
                got=repr(self.kv_page_stride),
                allowed=f"None, or at least page_size * {ROW_WIDTH} = {dense}",
                fix="pass kv_cache.stride(0), in elements",
            )

    def _normalise_sets(self) -> None:
        lens = _frozenset("query_lens", self.query_lens)
        for query_len in lens:
            _positive("query_lens", query_len)
        if not lens or max(lens) > self.max_model_len:
            raise ArgumentError(
                "query_lens names no block that a request can hold.",
                got=repr(sorted(lens)),
                allowed=f"one or more lengths of 1..{self.max_model_len}",
                fix="name every block length that serving will use",
            )
        masks = _frozenset("masks", self.masks)
        if not masks or not all(isinstance(mask, Mask) for mask in masks):
            raise ArgumentError(
                "masks names no mask.",
                got=repr(self.masks),
                allowed="one or both of Mask.CAUSAL, Mask.NON_CAUSAL",
                fix="name every mask that serving will use",
            )
        object.__setattr__(self, "query_lens", lens)
        object.__setattr__(self, "masks", masks)

    @property
    def max_query_len(self) -> int:
        """The longest block that the problem names."""
        return max(self.query_lens)

    @property
    def table_width(self) -> int:
        """Pages of the longest request: ceil(max_model_len / page_size)."""
        return -(-self.max_model_len // self.page_size)

    @property
    def page_stride(self) -> int:
        """Elements from a page to the next, declared or dense."""
        return self.kv_page_stride or self.page_size * ROW_WIDTH

    @property
    def needs_non_causal(self) -> bool:
        """Whether some block of the problem is non-causal in more than name."""
        return self.max_query_len > 1 and Mask.NON_CAUSAL in self.masks

    def blocks(self) -> Iterator[tuple[int, Mask]]:
        """Every (query length, mask) of the problem, sorted, each mask once.

        A one-token block is causal and non-causal at once and is given as CAUSAL.
        """
        return iter(_blocks(self.query_lens, self.masks))

    @property
    def summary(self) -> str:
        """What people need to recognise the problem; `as_dict` has all of it."""
        blocks = ", ".join(f"{q} token(s) {mask}" for q, mask in self.blocks())
        asked = ("needs_lse", "graphs", "batch_invariant", "dcp")
        wanted = [name for name in asked if getattr(self, name)]
        return (
            f"{self.num_q_heads} heads, {blocks}, {self.q_dtype} query, "
            f"{self.kv_dtype} cache, page {self.page_size}"
            + (f", with {', '.join(wanted)}" if wanted else "")
        )

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        dcp = self.dcp
        return {
            "num_q_heads": self.num_q_heads,
            "q_dtype": self.q_dtype,
            "kv_dtype": self.kv_dtype,
            "out_dtype": self.out_dtype,
            "page_size": self.page_size,
            "query_lens": sorted(self.query_lens),
            "masks": sorted(mask.value for mask in self.masks),
            "needs_lse": self.needs_lse,
            "dcp": dcp
            and {"world": dcp.world, "rank": dcp.rank, "interleave": dcp.interleave},
            "graphs": self.graphs,
            "kv_page_stride": self.kv_page_stride,
            "max_num_reqs": self.max_num_reqs,
            "max_model_len": self.max_model_len,
            "max_splits": self.max_splits,
            "deterministic": self.deterministic,
            "batch_invariant": self.batch_invariant,
        }


@lru_cache(maxsize=256)
def _blocks(
    query_lens: frozenset[int], masks: frozenset[Mask]
) -> tuple[tuple[int, Mask], ...]:
    """Sorted once: every check of every candidate of a planner goes over them."""
    seen = {
        (query_len, Mask.CAUSAL if query_len == 1 else mask)
        for query_len in query_lens
        for mask in masks
    }
    return tuple(sorted(seen, key=lambda block: (block[0], block[1].value)))


def _positive(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ArgumentError(
            f"{name} is not a positive int.",
            got=repr(value),
            allowed="a Python int of 1 or more",
            fix=f"pass {name} as a host int",
        )


def _frozenset(name: str, values: Any) -> frozenset[Any]:
    """A frozen copy of several values; a lone one is refused, not guessed."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ArgumentError(
            f"{name} is no set.",
            got=repr(values),
            allowed="a set, or another iterable",
            fix=f"pass every one of {name} that serving will use, such as {{...}}",
        )
    try:
        return frozenset(values)
    except TypeError as error:
        raise ArgumentError(
            f"{name} holds what no set can.",
            got=repr(values),
            allowed="a set, or another iterable of hashable values",
            fix=f"pass every one of {name} by itself, not in lists",
        ) from error


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(
            f"{name} is not a dtype of the contract.",
            got=repr(value),
            allowed=" ".join(allowed),
            fix=f"pass {name} as one of these strings",
        )
