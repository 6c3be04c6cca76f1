"""The unit of error: what a kernel of the same dtypes, without a fault, would lose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from mla_decode_contract.scene import Scene

LSE_FLOOR = 2.0**-18
"""Of lse's size: what fast exponentials and a different order of sums may lose."""


def rounded_decode(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode a scene as a kernel does: float32 sums, weights in the cache's dtype.

    Scores and sums are float32; the weights are rounded to the dtype in which they
    meet the values (fp8 where the query is fp8, else the 16-bit one); the output is
    rounded to its dtype.

    Returns:
        out [T, H, 512] and lse [T, H], both float64 on the CPU.
    """
    problem = scene.problem
    rows, heads = scene.q.shape[:2]
    out = torch.zeros((rows, heads, LATENT_WIDTH), dtype=torch.float64)
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64)
    out_dtype = torch_dtype(problem.out_dtype, scene.ctx.device)
    weight_dtype = torch_dtype(
        problem.q_dtype if problem.q_dtype in {"fp8", "fp32"} else "bf16",
        scene.ctx.device,
    )
    if problem.q_dtype == "fp16":
        weight_dtype = torch.float16
    for request, seq_len in enumerate(scene.seq_lens):
        first, last = scene.starts[request], scene.starts[request + 1]
        if seq_len == 0 or first == last:
            continue
        keys = scene.keys_of(request).float() * scene.kv_scale_value
        query = scene.q[first:last].cpu().float() * scene.q_scale_value
        scores = torch.einsum("qhd,kd->qhk", query, keys) * scene.softmax_scale
        visible = scene.visible(request)
        hidden = torch.arange(seq_len)[None, :] >= visible[:, None]
        scores = scores.masked_fill(hidden[:, None, :], -torch.inf)
        peak = scores.amax(-1, keepdim=True)
        peak = torch.where(peak.isinf(), 0.0, peak)
        weights = torch.exp(scores - peak)
        total = weights.sum(-1, keepdim=True)
        values = keys[:, :LATENT_WIDTH]
        mixed = torch.einsum("qhk,kd->qhd", weights.to(weight_dtype).float(), values)
        row = torch.where(total > 0, mixed / total, 0.0)
        out[first:last] = row.to(out_dtype).double()
        lse[first:last] = (peak + total.log()).squeeze(-1).double()
    return out, lse


def out_units(reference: torch.Tensor, truth: torch.Tensor, eps: float) -> torch.Tensor:
    """The unit of each row of out: the reference's error, at least half a last place.

    Args:
        reference: [T, H, 512] float64, `rounded_decode`'s.
        truth: [T, H, 512] float64, the oracle's.
        eps: Machine epsilon of the output dtype.
    """
    half_place = truth.abs().amax(-1) * (eps / 2)
    return torch.maximum((reference - truth).abs().amax(-1), half_place)


def lse_units(reference: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The unit of each row of lse, [T, H] float64; infinite rows have none."""
    floor = truth.abs().clamp(min=1.0) * LSE_FLOOR
    finite = truth.isfinite()
    error = torch.where(finite, (reference - truth).abs(), 0.0)
    return torch.maximum(error, floor)
