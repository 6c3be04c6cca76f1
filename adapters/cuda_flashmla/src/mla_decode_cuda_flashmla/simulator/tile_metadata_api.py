"""``flash_mla`` in its 2025 form: two tensors, planned by a call of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode_cuda_flashmla.simulator import launches

if TYPE_CHECKING:
    from torch import Tensor


def get_mla_metadata(
    cache_seqlens: Tensor, num_heads_per_head_k: int, num_heads_k: int
) -> tuple[Tensor, Tensor]:
    """Plan: (tile_scheduler_metadata int32 [lists, 8], num_splits int32 [B+1])."""
    return launches.plan_tile_metadata(
        cache_seqlens, num_heads_per_head_k // num_heads_k
    )


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode with a schedule that nothing compares with the lengths."""
    out, lse, _, _ = launches.decode(
        q,
        k_cache,
        head_dim_v,
        cache_seqlens,
        block_table,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
        (tile_scheduler_metadata, num_splits),
        model="first",
    )
    return out, lse
