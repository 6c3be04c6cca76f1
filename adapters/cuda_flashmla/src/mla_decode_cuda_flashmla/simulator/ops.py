"""The simulated launches as torch operators: what a recorded graph replays whole.

Reading lengths on the host is the simulator's own business; to torch, and so to a
recorder, each launch is one operator over tensors, as it is on the card.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode_cuda_flashmla.simulator.attention import MODELS, attend
from mla_decode_cuda_flashmla.simulator.schedule import (
    sched_meta_schedule,
    tile_metadata_schedule,
)

if TYPE_CHECKING:
    from torch import Tensor


@torch.library.custom_op(
    "mla_decode_flashmla_simulator::plan",
    mutates_args=(),
    schema="(Tensor seq_lens, int num_lists, str model) -> (Tensor, Tensor)",
)
def plan(seq_lens: Tensor, num_lists: int, model: str) -> tuple[Tensor, Tensor]:
    """The scheduler's launch: (work lists int32 [num_lists, 8], splits int32 [B+1])."""
    make = sched_meta_schedule if model == "sm90" else tile_metadata_schedule
    tiles, splits = make(seq_lens.tolist(), num_lists)
    return tiles.to(seq_lens.device), splits.to(seq_lens.device)


@torch.library.custom_op(
    "mla_decode_flashmla_simulator::decode",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor cache, Tensor seq_lens, Tensor table, Tensor tiles, "
        "Tensor splits, float softmax_scale, bool causal, str model, "
        "Tensor? q_scale, Tensor? kv_scale) -> (Tensor, Tensor)"
    ),
)
def decode(
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    tiles: Tensor,
    splits: Tensor,
    softmax_scale: float,
    causal: bool,
    model: str,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention and combine: (out [B, Q, H, 512], lse float32 [B, H, Q])."""
    value_scale, scale = 1.0, softmax_scale
    if q_scale is not None and kv_scale is not None:
        value_scale = float(kv_scale)
        scale *= float(q_scale) * value_scale
    out, lse = attend(
        q,
        cache,
        seq_lens.tolist(),
        table,
        tiles,
        splits,
        softmax_scale=scale,
        causal=causal and q.shape[1] > 1,
        model=MODELS[model],
        value_scale=value_scale,
    )
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return out.to(dtype), lse
