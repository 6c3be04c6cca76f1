"""A plan: how a backend serves a problem, natively or rewritten, as printable data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mla_decode.backend import Cost
    from mla_decode.mask import Mask
    from mla_decode.problem import DecodeProblem

Kind = Literal["native", "fold", "pad", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One exact way to hand a block of a problem to a backend.

    Rows of MLA decode are independent and share their KV, so that tokens of a block
    may become heads of one token (fold), rows may be added and dropped (pad), and a
    request may stand in the batch several times (split).
    """

    query_len: int
    mask: Mask
    group: int
    """Tokens of the block in one virtual request; Q where the block stays whole."""
    lowered: DecodeProblem
    """The ordinary problem that the backend's builder is built for."""
    is_native: bool = False
    pad_tokens: int = 0
    """Tokens added to a request's block: to a kernel's block length, or full groups."""
    pad_heads: int = 0
    """Heads added to each token that the kernel sees, to reach a kernel's width."""

    @property
    def num_virtual(self) -> int:
        """Virtual requests of one request: ceil(Q / group)."""
        return -(-self.query_len // self.group)

    @property
    def is_folded(self) -> bool:
        """Whether the kernel sees the tokens of a group as heads of one token."""
        return not self.is_native and self.lowered.max_query_len == 1

    @property
    def pad_rows(self) -> int:
        """Query rows a request that exist only to reach a kernel's width."""
        width = self.lowered.num_q_heads
        if self.is_folded:
            heads = (width - self.pad_heads) // self.group
            return self.pad_tokens * heads + self.num_virtual * self.pad_heads
        return self.pad_tokens * width + self.query_len * self.pad_heads

    @property
    def kernel_rows(self) -> int:
        """Query rows that one virtual request gives the kernel, pads included."""
        return self.lowered.num_q_heads * self.lowered.max_query_len

    @property
    def kind(self) -> Kind:
        """The word for the rewrite."""
        if self.is_native:
            return "native"
        if self.num_virtual > 1:
            return "split"
        return "pad" if self.pad_rows else "fold"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """A rewrite with its price."""

    rewrite: Rewrite
    cost: Cost
    """Of one step of the block's largest batch, the rewrite's own copies included."""
    copy_bytes: int = 0
    """Of the cost's workspace, what the rewrite's own buffers take."""

    @property
    def num_bytes(self) -> int:
        """Device memory of the builder and of a call."""
        return self.cost.workspace_bytes + self.cost.call_bytes

    @property
    def rank(self) -> tuple[int, ...]:
        """What plans are compared by: KV walks, then workspace, rows and launches.

        Of plans that read the KV as often, a native one wins, then the one with fewer
        virtual requests: a rewrite that saves no walk is not worth its index copies.
        """
        cost = self.cost
        return (
            cost.kv_walks,
            0 if self.rewrite.is_native else self.rewrite.num_virtual,
            self.num_bytes,
            cost.rows,
            cost.launches,
        )

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        rewrite = self.rewrite
        return {
            "query_len": rewrite.query_len,
            "mask": rewrite.mask.value,
            "kind": rewrite.kind,
            "group": rewrite.group,
            "num_virtual": rewrite.num_virtual,
            "kernel_query_lens": sorted(rewrite.lowered.query_lens),
            "kernel_num_q_heads": rewrite.lowered.num_q_heads,
            "pad_rows": rewrite.pad_rows,
            **asdict(self.cost),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a backend serves every block of a problem."""

    problem: DecodeProblem
    blocks: tuple[BlockPlan, ...]
    """One a (query length, mask), in the order of `DecodeProblem.blocks`."""
    workspace_bytes: int
    """Device memory of all blocks' builders together, inner and lowered."""

    @property
    def heaviest(self) -> BlockPlan:
        """The rewritten block with the most KV walks; a native one if none is."""
        return max(
            self.blocks, key=lambda b: (not b.rewrite.is_native, b.cost.kv_walks)
        )

    @property
    def kind(self) -> Kind:
        """``native`` where every block is, else the heaviest rewrite's name."""
        return self.heaviest.rewrite.kind

    @property
    def cost(self) -> Cost:
        """The heaviest block's, with the memory of all blocks together."""
        return replace(
            self.heaviest.cost,
            workspace_bytes=self.workspace_bytes,
            call_bytes=max(block.cost.call_bytes for block in self.blocks),
        )

    @property
    def pad_rows(self) -> int:
        """Of the heaviest block."""
        return self.heaviest.rewrite.pad_rows

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        return {
            "kind": self.kind,
            **asdict(self.cost),
            "pad_rows": self.pad_rows,
            "blocks": [block.as_dict() for block in self.blocks],
        }
