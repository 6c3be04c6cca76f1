"""SCALE: the softmax scale is asked for, fp8 scales stay on the device."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode.mask import Mask
from mla_decode_contract.call import check, decode, forward
from mla_decode_contract.cases.common import (
    block_problem,
    fp8_problem,
    longer_block,
    serve,
)
from mla_decode_contract.demand import demand_error
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import RefusalViolation, require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext


@implements("scale.is_required")
def is_required(ctx: CaseContext) -> None:
    """No default to fall back to."""
    parameter = inspect.signature(ctx.backend.forward).parameters.get("softmax_scale")
    require(parameter is not None, "forward has no parameter softmax_scale")
    if parameter is not None:
        require(
            parameter.kind is inspect.Parameter.KEYWORD_ONLY
            and parameter.default is inspect.Parameter.empty,
            f"softmax_scale is {parameter}: the contract has a required keyword",
        )
    scene = draw_scene(ctx, ctx.problem(), [10])
    metadata = ctx.builder(scene.problem).build(scene.common)
    arguments: dict[str, Any] = {
        "q_scale": scene.q_scale,
        "kv_scale": scene.kv_scale,
    }
    try:
        ctx.backend.forward(scene.q, scene.kv_cache, metadata, **arguments)
    except (TypeError, ValueError):
        return
    raise RefusalViolation("a call without softmax_scale was served")


@implements("scale.invalid_refused")
def invalid_refused(ctx: CaseContext) -> None:
    """Values that no model has."""
    scene = draw_scene(ctx, ctx.problem(), [10])
    metadata = ctx.builder(scene.problem).build(scene.common)
    for value in (0.0, -0.1, float("nan"), float("inf"), 1, None, torch.tensor(0.1)):
        demand_error(
            (ValueError, TypeError),
            f"softmax_scale={value!r}",
            partial(forward, scene, metadata, softmax_scale=value),
        )


@implements("scale.is_applied")
def is_applied(ctx: CaseContext) -> None:
    """Scales unlike any that the shapes suggest, a large one where keys are hidden.

    A block over one key more than whole tiles: a piece of its own, if keys are split, that
    all rows but the last token's see nothing of. A peak that starts too low overflows there.
    """
    problem = ctx.problem()
    for value in (0.011, 0.21):
        scene = draw_scene(ctx, problem, [40, 90], softmax_scale=value)
        check(scene, decode(scene), label=f"scale {value} ")
    query_len = longer_block(ctx, causal=True, wanted=8)
    if query_len in ctx.row.query_lens.get(Mask.CAUSAL, ()):
        block = replace(block_problem(ctx, query_len, causal=True), max_model_len=640)
        for length in (193, 577):
            scene = draw_scene(ctx, block, [length], softmax_scale=1.0)
            check(scene, decode(scene), label=f"scale 1.0, {length} keys ")


@implements("scale.fp8_is_required")
def fp8_is_required(ctx: CaseContext) -> None:
    """Left out, as a host float, and of a wrong shape."""
    scene = draw_scene(ctx, fp8_problem(ctx), [10])
    metadata = ctx.builder(scene.problem).build(scene.common)
    wrong = (None, 0.5, torch.ones(2, device=ctx.torch_device))
    names = ["kv_scale"] + (["q_scale"] if scene.q_scale is not None else [])
    for name in names:
        for value in wrong:
            demand_error(
                ValueError,
                f"{name}={value!r}",
                partial(forward, scene, metadata, **{name: value}),
            )


@implements("scale.fp8_is_applied")
def fp8_is_applied(ctx: CaseContext) -> None:
    """The drawn scales are 0.25 and 0.5: leaving one out is far off."""
    serve(ctx, fp8_problem(ctx), [40, 90])


@implements("scale.fp8_cache_as_uint8")
def fp8_cache_as_uint8(ctx: CaseContext) -> None:
    """Bytes in, the same values out."""
    scene = draw_scene(ctx, fp8_problem(ctx), [40, 90])
    raw = replace(scene, kv_cache=scene.kv_cache.view(torch.uint8))
    check(scene, decode(raw))


@implements("scale.unasked_refused")
def unasked_refused(ctx: CaseContext) -> None:
    """A kv_scale for a cache that is not fp8 would be ignored: it is refused."""
    declared = sorted(pair for pair in ctx.row.dtypes if pair[1] != "fp8")
    problem = ctx.problem(dtypes=declared[0] if declared else ("bf16", "bf16"))
    scene = draw_scene(ctx, problem, [10])
    metadata = ctx.builder(problem).build(scene.common)
    require(
        scene.kv_cache.dtype == torch_dtype(problem.kv_dtype, ctx.device),
        "the scene's cache has another dtype than its problem",
    )
    one = torch.ones(1, device=ctx.torch_device)
    demand_error(
        ValueError,
        "kv_scale for a cache that is not fp8",
        lambda: forward(scene, metadata, kv_scale=one),
    )
