"""How each form of the library plans a schedule and decodes: keyword arguments only.

The library inserted parameters in the middle of its signature once: a positional mask
then lands on the scale, and nothing is raised. Nothing is passed by position here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from mla_decode.problem import LATENT_WIDTH
from mla_decode_cuda_flashmla.limits import (
    FIXED_SCHEDULER_MAX_REQS,
    MIN_SCALE,
    SCHEDULER_MAX_REQS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


class BoundDecode(Protocol):
    """A step's call, for each of its layers."""

    def __call__(
        self, *, q: Tensor, k_cache: Tensor, softmax_scale: float, **scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the kernel on the current stream.

        Args:
            q: [B, Q, H, 576], contiguous, 16-byte aligned.
            k_cache: [P, 64, 1, 576].
            softmax_scale: Multiplies q.k.
            **scales: ``descale_q`` and ``descale_k``, of an fp8 call alone.

        Returns:
            out [B, Q, H, 512] and lse float32 [B, H, Q], natural logarithm, +inf for a
            row without keys. Both are the caller's.
        """


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

    def bind(
        self, block_table: Tensor, seq_lens: Tensor, schedule: Any, causal: bool
    ) -> BoundDecode:
        """The kernel's call with a step's constants filled in.

        Args:
            block_table: int32 [B, width >= 1].
            seq_lens: int32 [B]: those that the schedule was planned for.
            schedule: From `plan`.
            causal: Tail-aligned mask.
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

    def bind(
        self, block_table: Tensor, seq_lens: Tensor, schedule: Any, causal: bool
    ) -> BoundDecode:
        """See `DenseDecode.bind`."""
        run = partial(self.run, **self.extra) if self.extra else self.run
        return _bind(run, block_table, seq_lens, schedule, None, causal)


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

    def bind(
        self, block_table: Tensor, seq_lens: Tensor, schedule: Any, causal: bool
    ) -> BoundDecode:
        """See `DenseDecode.bind`."""
        tiles, num_splits = schedule
        return _bind(self.run, block_table, seq_lens, tiles, num_splits, causal)


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

    def bind(
        self, block_table: Tensor, seq_lens: Tensor, schedule: Any, causal: bool
    ) -> BoundDecode:
        """See `DenseDecode.bind`."""
        return partial(
            self.run,
            block_table=block_table,
            cache_seqlens=seq_lens,
            head_dim_v=LATENT_WIDTH,
            causal=causal,
            **schedule,
        )


def _bind(
    run: Callable[..., tuple[Tensor, Tensor]],
    block_table: Tensor,
    seq_lens: Tensor,
    schedule: Any,
    num_splits: Tensor | None,
    causal: bool,
) -> BoundDecode:
    """The library's function with a step's constants: a third of a `partial`'s time."""

    def call(
        *, q: Tensor, k_cache: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        return run(
            q=q,
            k_cache=k_cache,
            block_table=block_table,
            cache_seqlens=seq_lens,
            head_dim_v=LATENT_WIDTH,
            tile_scheduler_metadata=schedule,
            num_splits=num_splits,
            softmax_scale=softmax_scale,
            causal=causal,
        )

    return cast("BoundDecode", call)  # no scales: those of an fp8 call are its form's
