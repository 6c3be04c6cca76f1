"""``flash_mla`` in its 2026 form: an object that the first call fills in."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mla_decode_cuda_flashmla.simulator import launches
from mla_decode_cuda_flashmla.simulator.faults import host_check

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a schedule object remembers of its first call; lengths are not in it."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    is_fp8_kvcache: bool


@dataclass(slots=True, kw_only=True)
class FlashMLASchedMeta:
    """A schedule, empty until a decode fills it."""

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None

    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """The two planned tensors, None before the first call."""
        if self.tile_scheduler_metadata is None or self.num_splits is None:
            return None
        return self.tile_scheduler_metadata, self.num_splits


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule; arguments are accepted and ignored."""
    del args, kwargs
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode; plans on the first call with a schedule object, and never again.

    Raises:
        AssertionError: A later call differs from the first in what the object
            remembers.
        RuntimeError: A host check of the compiled part.
    """
    schedule = tile_scheduler_metadata
    _assert(isinstance(schedule, FlashMLASchedMeta), "must be FlashMLASchedMeta")
    _assert(num_splits is None, "num_splits must be None")
    config = Config(
        b=q.shape[0],
        s_q=q.shape[1],
        h_q=q.shape[2],
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2],
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
    )
    if schedule.config is not None:
        for name in (item.name for item in fields(Config)):
            same = getattr(schedule.config, name) == getattr(config, name)
            _assert(same, f"sched_meta.config.{name} must be equal")
    schedule.have_initialized, schedule.config = True, config
    host_check(indices is None, "sparse decode is not simulated")
    if block_table is None or cache_seqlens is None:
        raise AssertionError("block_table and cache_seqlens must be provided")
    out, lse, tiles, splits = launches.decode(
        q,
        k_cache,
        head_dim_v,
        cache_seqlens,
        block_table,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
        schedule.tensors(),
        model="sm90",
    )
    schedule.tile_scheduler_metadata, schedule.num_splits = tiles, splits
    return out, lse


def _assert(holds: bool, message: str) -> None:
    """The library's own ``assert``, which a caller sees as an AssertionError."""
    if not holds:
        raise AssertionError(message)
