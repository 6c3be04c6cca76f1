"""Layers of one step and tails of one softmax: what only fp8 shows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode_contract.call import check, decode
from mla_decode_contract.cases.common import fp8_problem
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode_contract.context import CaseContext
    from mla_decode_contract.scene import Scene

TAIL_KEYS, TAIL_SCORE = 2048, -7.0
"""One key scores 0, the others this: together they weigh more than it."""
TAIL_TOLERANCE = 0.05
"""Weights scaled to fp8's range lose 0.003; weights that vanish in it, 0.65."""


@implements("scale.fp8_per_layer")
def fp8_per_layer(ctx: CaseContext) -> None:
    """Four calls over one metadata: the third goes back to the first layer's scale."""
    scene = draw_scene(ctx, fp8_problem(ctx), [40, 90])
    metadata = ctx.builder(scene.problem).build(scene.common)
    for number, factor in enumerate((1.0, 4.0, 1.0, 0.125)):
        layer = _rescaled(scene, factor)
        check(layer, decode(layer, metadata=metadata), label=f"layer {number} ")


def _rescaled(scene: Scene, factor: float) -> Scene:
    if scene.kv_scale is None:
        return scene
    changes: dict[str, Any] = {
        "kv_scale": scene.kv_scale * factor,
        "kv_scale_value": scene.kv_scale_value * factor,
    }
    if scene.q_scale is not None:
        changes["q_scale"] = scene.q_scale / factor
        changes["q_scale_value"] = scene.q_scale_value / factor
    return replace(scene, **changes)


@implements("dtype.fp8_long_tail")
def fp8_long_tail(ctx: CaseContext) -> None:
    """The peak as the first key of one request, as the last of another; values are 1."""
    problem = fp8_problem(ctx, max_model_len=TAIL_KEYS)
    lens = [TAIL_KEYS, TAIL_KEYS]
    scene = draw_scene(ctx, problem, lens)
    rope = ROW_WIDTH - LATENT_WIDTH
    scale = -TAIL_SCORE / (rope * scene.q_scale_value * scene.kv_scale_value)
    scene = replace(scene, softmax_scale=scale)
    scene.q.zero_()
    scene.q[..., LATENT_WIDTH:] = torch.ones((), dtype=scene.q.dtype)
    for request, peak in enumerate((0, TAIL_KEYS - 1)):
        keys = torch.full((TAIL_KEYS, ROW_WIDTH), -1.0)
        keys[:, :LATENT_WIDTH] = 1.0 / scene.kv_scale_value
        keys[peak, LATENT_WIDTH:] = 0.0
        _write(scene, request, keys)
    out, lse = scene.truth()
    due = math.log1p((TAIL_KEYS - 1) * math.exp(TAIL_SCORE))
    require(
        bool((out - 1.0).abs().max() < 1e-6) and bool((lse - due).abs().max() < 1e-6),
        "the scene is not what it should be",
    )
    result = decode(scene)
    worst = float((result.out.cpu().double() - 1.0).abs().max())
    ctx.notes.append(f"largest error of out over the tail: {worst:.3g}")
    require(
        worst <= TAIL_TOLERANCE,
        f"values of 1 under {TAIL_KEYS - 1} weights of exp({TAIL_SCORE:g}) beside one of "
        f"1 gave an output off by {worst:.3g}: the tail is lost",
    )
    if result.lse is not None:
        apart = float((result.lse.cpu().double() - due).abs().max())
        require(apart <= TAIL_TOLERANCE, f"their lse is off by {apart:.3g}")


def _write(scene: Scene, request: int, keys: Tensor) -> None:
    """Put keys [seq_len, 576] into a request's pages."""
    size = scene.problem.page_size
    rows = keys.to(scene.kv_cache.dtype).to(scene.kv_cache.device)
    table = scene.common.block_table_tensor[request].tolist()
    for number, page in enumerate(table[: -(-keys.shape[0] // size)]):
        part = rows[number * size : (number + 1) * size]
        scene.kv_cache[page, : part.shape[0]] = part
