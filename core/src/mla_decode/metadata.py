"""What an engine says of a step, and what a builder makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mla_decode.errors import StaleMetadataError
from mla_decode.mask import Mask

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mla_decode.builder import MLADecodeMetadataBuilder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonAttentionMetadata:
    """One step's batch in the engine's words; names and meanings follow vLLM's.

    Decode only: every request has one uniform block of Q tokens (or a ragged one, for
    a builder that is VARLEN), pads at the tail. The KV of the block is already in the
    cache.
    """

    query_start_loc: Tensor
    """int32 [num_reqs + 1] on the device: where each request's query rows begin."""
    query_start_loc_cpu: Tensor
    """The same numbers on the CPU; these are the ones that are validated."""
    seq_lens: Tensor
    """int32 [num_reqs] on the device: keys of each request, this step's included."""
    num_reqs: int
    """Requests, pads included."""
    num_actual_tokens: int
    """Query tokens: the sum of the block lengths, or num_reqs * Q with pads."""
    max_query_len: int
    """The longest block, in tokens; the Q of a batch that is all pads."""
    max_seq_len: int
    """An upper bound of seq_lens, known on the host."""
    block_table_tensor: Tensor
    """int32 [>= num_reqs, width] on the device; slots past a request's pages are free
    to hold anything and are never read."""
    slot_mapping: Tensor | None = None
    """int64 [tokens]: where the engine wrote this step's KV. Carried, never read."""
    causal: bool | np.bool_ | Tensor = True
    """True: tail-aligned causal. False: every token of the block sees all keys."""
    dcp_local_seq_lens: Tensor | None = None
    """int32 [num_reqs] on the device: keys that this rank holds, under DCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a backend says of one step that it planned; made on demand."""

    kernels: tuple[str, ...] = ()
    """Device kernels of one forward, as a profiler prints them."""
    path: str = ""
    """Which of its ways the library takes, in a few words."""
    num_q_heads: int
    """Heads that the kernel is given, pads included."""
    query_len: int
    """Tokens of a block that the kernel is given; 0 where the batch is ragged."""
    max_splits: int | None = None
    """Most pieces that a request's keys are cut into; 1: not cut; None: not said."""
    downgrades: tuple[str, ...] = ()
    """What the backend could not do as it would elsewhere, each with its reason."""


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeMetadata:
    """What one build made for one step: shared by all layers of the group.

    Adapters subclass it with their schedules. The fields below ``query_len`` are
    core's: an adapter's `_build_decode` leaves them alone.
    """

    block_table: Tensor
    """int32 [num_reqs, width] on the device."""
    seq_lens: Tensor
    """int32 [num_reqs] on the device; under DCP this rank's lengths."""
    query_start_loc: Tensor
    """int32 [num_reqs + 1] on the device."""
    max_seq_len: int
    """Upper bound of seq_lens; ``max_model_len`` where the problem has graphs."""
    num_reqs: int
    num_decode_tokens: int
    """Rows of q, out and lse."""
    dcp_tot_seq_lens: Tensor | None = None
    """int32 [num_reqs]: global lengths under DCP."""
    causal: bool = field(default=True, init=False)
    """The mask that built the schedule, and the one that the kernel gets."""
    query_len: int = field(default=0, init=False)
    """Q of a uniform batch; 0 where the batch is ragged."""
    builder: MLADecodeMetadataBuilder | None = field(default=None, init=False)
    generation: int = field(default=-1, init=False)
    bound: tuple[Tensor, ...] = field(default=(), init=False)
    """The three tensors above as they were built: others may not take their place."""
    last_page: int = field(default=-1, init=False)
    """The highest used table slot, known under ``validate="device"`` only."""
    geometry: object = field(default=None, init=False)
    """The tensor geometry that `forward` has checked already."""

    @property
    def mask(self) -> Mask:
        """The batch's mask as a word."""
        return Mask.CAUSAL if self.causal else Mask.NON_CAUSAL

    def facts(self) -> StepFacts:
        """How the step is decoded; adapters say more than core knows."""
        builder = self.builder
        return StepFacts(
            num_q_heads=0 if builder is None else builder.problem.num_q_heads,
            query_len=self.query_len,
        )

    def keeps_tensors(self) -> bool:
        """Whether table, lengths and block starts are the objects of the build."""
        table, lens, starts = self.bound
        return (
            self.seq_lens is lens
            and self.block_table is table
            and self.query_start_loc is starts
        )

    def require_current(self) -> MLADecodeMetadataBuilder:
        """The builder that made this, if this is its newest metadata.

        Raises:
            StaleMetadataError: A later build replaced it, no builder made it, or one of
                its tensors was exchanged.
        """
        builder = self.builder
        if builder is None or builder.generation != self.generation:
            newest = "no builder" if builder is None else f"#{builder.generation}"
            raise StaleMetadataError(
                "The metadata is not its builder's newest: its lengths, table and "
                "schedule are another step's.",
                got=f"metadata #{self.generation}, newest {newest}",
                allowed="the metadata that the builder's last build returned",
                fix="call build for this step and pass what it returns to every layer",
            )
        if not self.keeps_tensors():
            raise StaleMetadataError(
                "A tensor of the metadata was exchanged after its build: the schedule, "
                "and graphs that recorded it, still read the one that was built.",
                got="another block_table, seq_lens or query_start_loc",
                allowed="the tensors that the build put there",
                fix="call build for the new lengths: it refreshes what graphs read",
            )
        return builder
