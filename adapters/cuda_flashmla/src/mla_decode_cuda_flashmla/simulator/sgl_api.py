"""``flash_mla`` as sgl-flash-mla 1.0.0 ships it: current kernels, and the kept ones.

Its dense calls need ``use_legacy=True``, and do not compare a call with the one that
planned: the schedule object is a bag for two tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_decode_cuda_flashmla.simulator import launches
from mla_decode_cuda_flashmla.simulator.sched_meta_api import FlashMLASchedMeta

if TYPE_CHECKING:
    from torch import Tensor


def has_legacy() -> bool:
    """Whether the wheel was built with the kept kernels."""
    return True


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule; arguments are accepted and ignored."""
    del args, kwargs
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Plan apart from a decode; fp8 has a scheduler of its own."""
    del h_q, topk
    _assert(use_legacy, "dense decode exists only on the legacy side")
    plan = launches.plan_tile_metadata if is_fp8_kvcache else launches.plan_sched_meta
    return plan(seqlens_k, num_q_tokens_per_head_k // h_k)


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
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode, bf16 and fp16 or fp8."""
    del enable_batch_invariant
    schedule = tile_scheduler_metadata
    _assert(num_splits is None, "num_splits must be None")
    _assert(indices is None, "sparse decode is not simulated")
    _assert(use_legacy, "dense decode exists only on the legacy side")
    _assert(
        block_table is not None and cache_seqlens is not None,
        "block_table and cache_seqlens must be provided",
    )
    planned = schedule.tensors()
    if is_fp8_kvcache:
        _assert(planned is not None, "dense fp8 needs metadata before the first call")
        _assert(descale_q is not None and descale_k is not None, "descale is required")
    out, lse, tiles, splits = launches.decode(
        q,
        k_cache,
        head_dim_v,
        cache_seqlens,  # type: ignore[arg-type]  # asserted above
        block_table,  # type: ignore[arg-type]  # asserted above
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
        planned,
        model="first" if is_fp8_kvcache else "sm90",
        scales=(descale_q, descale_k),
    )
    schedule.tile_scheduler_metadata, schedule.num_splits = tiles, splits
    return out, lse


def _assert(holds: bool, message: str) -> None:
    """The library's own ``assert``, which a caller sees as an AssertionError."""
    if not holds:
        raise AssertionError(message)
