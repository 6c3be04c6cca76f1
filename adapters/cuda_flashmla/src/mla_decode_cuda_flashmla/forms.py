"""How each form of the library plans a schedule and decodes: keyword arguments only.

The library inserted parameters in the middle of its signature once: a positional mask
then lands on the scale, and nothing is raised. Nothing is passed by position here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mla_decode.problem import LATENT_WIDTH
from mla_decode_cuda_flashmla.limits import (
    FIXED_SCHEDULER_MAX_REQS,
    MIN_SCALE,
    SCHEDULER_MAX_REQS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


class DenseDecode(Protocol):
    """One way to call a dense decode kernel."""

    @property
    def form(self) -> str:
        """The form's name, as reports print it."""

    @property
    def serves_empty_rows(self) -> bool:
        """Whether a request without keys is safe: out = 0 and lse = +inf.

        Where False, the kernel looks up the page before a request's first one.
        """

    @property
    def max_num_reqs(self) -> int:
        """Most requests that the form's scheduler plans."""

    @property
    def min_scale(self) -> float:
        """The smallest softmax scale under which hidden keys weigh nothing."""

    def plan(self, seq_lens: Tensor, num_rows: int) -> Any:
        """A schedule for these lengths (int32 [B]) and rows a request (Q*H).

        Bound to the values of seq_lens, which the library does not check later.
        """

    def decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        schedule: Any,
        softmax_scale: float,
        causal: bool,
        scales: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Run the kernel.

        Args:
            q: [B, Q, H, 576], contiguous, 16-byte aligned.
            kv_cache: [P, 64, 1, 576].
            block_table: int32 [B, width >= 1].
            seq_lens: int32 [B]: those that the schedule was planned for.
            schedule: From `plan`.
            softmax_scale: Multiplies q.k.
            causal: Tail-aligned mask.
            scales: (q_scale, kv_scale) of an fp8 call; (None, None) elsewhere.

        Returns:
            out [B, Q, H, 512] and lse float32 [B, H, Q], natural logarithm, +inf for a
            row without keys. Both are the caller's.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedMetaForm:
    """The 2026 form: an object that the first call fills with its schedule."""

    new_schedule: Callable[[], Any]
    run: Callable[..., tuple[Tensor, Tensor]]
    extra: Mapping[str, Any]
    """Arguments that only this provider takes, such as ``use_legacy``."""
    form: str = "sched_meta"
    serves_empty_rows: bool = True
    max_num_reqs: int = SCHEDULER_MAX_REQS
    min_scale: float = MIN_SCALE

    def plan(self, seq_lens: Tensor, num_rows: int) -> Any:
        """An empty object: the first decode plans, on the stream that it runs on."""
        del seq_lens, num_rows
        return self.new_schedule()

    def decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        schedule: Any,
        softmax_scale: float,
        causal: bool,
        scales: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """See `DenseDecode.decode`."""
        del scales
        return self.run(
            q=q,
            k_cache=kv_cache,
            block_table=block_table,
            cache_seqlens=seq_lens,
            head_dim_v=LATENT_WIDTH,
            tile_scheduler_metadata=schedule,
            num_splits=None,
            softmax_scale=softmax_scale,
            causal=causal,
            **self.extra,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TileMetadataForm:
    """The 2025 form: two tensors, planned by a call of their own."""

    new_schedule: Callable[..., tuple[Tensor, Tensor]]
    rows_parameter: str
    """``num_heads_per_head_k``, renamed ``num_q_tokens_per_head_k`` in autumn 2025."""
    run: Callable[..., tuple[Tensor, Tensor]]
    form: str = "tile_metadata"
    serves_empty_rows: bool = False
    max_num_reqs: int = FIXED_SCHEDULER_MAX_REQS
    min_scale: float = MIN_SCALE

    def plan(self, seq_lens: Tensor, num_rows: int) -> Any:
        """Plan on the current stream."""
        return self.new_schedule(
            cache_seqlens=seq_lens, num_heads_k=1, **{self.rows_parameter: num_rows}
        )

    def decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        schedule: Any,
        softmax_scale: float,
        causal: bool,
        scales: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """See `DenseDecode.decode`."""
        del scales
        tiles, num_splits = schedule
        return self.run(
            q=q,
            k_cache=kv_cache,
            block_table=block_table,
            cache_seqlens=seq_lens,
            head_dim_v=LATENT_WIDTH,
            tile_scheduler_metadata=tiles,
            num_splits=num_splits,
            softmax_scale=softmax_scale,
            causal=causal,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Form:
    """Dense fp8, an extension that two providers carry; planned by its own call."""

    new_schedule: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    """Takes (seq_lens, rows a request)."""
    run: Callable[..., tuple[Tensor, Tensor]]
    wrap_schedule: Callable[[Tensor, Tensor], Mapping[str, Any]]
    """Turns the two planned tensors into the provider's keyword arguments."""
    form: str = "dense_fp8"
    serves_empty_rows: bool = False
    max_num_reqs: int = FIXED_SCHEDULER_MAX_REQS
    min_scale: float = 0.0

    def plan(self, seq_lens: Tensor, num_rows: int) -> Any:
        """Plan on the current stream."""
        return self.wrap_schedule(*self.new_schedule(seq_lens, num_rows))

    def decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        schedule: Any,
        softmax_scale: float,
        causal: bool,
        scales: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """See `DenseDecode.decode`."""
        return self.run(
            q=q,
            k_cache=kv_cache,
            block_table=block_table,
            cache_seqlens=seq_lens,
            head_dim_v=LATENT_WIDTH,
            softmax_scale=softmax_scale,
            causal=causal,
            descale_q=scales[0],
            descale_k=scales[1],
            **schedule,
        )
