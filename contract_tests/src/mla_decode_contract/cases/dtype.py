"""DTYPE: from the problem, never from a global setting."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mla_decode.errors import StaleMetadataError
from mla_decode_contract.call import check, decode, forward
from mla_decode_contract.cases.common import serve
from mla_decode_contract.demand import demand_error
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext


@implements("dtype.fp16")
def fp16(ctx: CaseContext) -> None:
    """float16 throughout."""
    serve(ctx, ctx.problem(dtypes=("fp16", "fp16")), [10, 120])


@implements("dtype.bf16_over_fp8")
def bf16_over_fp8(ctx: CaseContext) -> None:
    """A 16-bit query over an 8-bit cache."""
    serve(ctx, ctx.problem(dtypes=("bf16", "fp8")), [10, 120])


@implements("dtype.global_default_ignored")
def global_default(ctx: CaseContext) -> None:
    """The default dtype is float64 while the backend works."""
    scene = draw_scene(ctx, ctx.problem(), [10, 45])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        result = decode(scene)
    finally:
        torch.set_default_dtype(before)
    check(scene, result)


@implements("dtype.other_query_refused")
def other_query(ctx: CaseContext) -> None:
    """float64 where the problem names another dtype."""
    scene = draw_scene(ctx, ctx.problem(), [10, 45])
    metadata = ctx.builder(scene.problem).build(scene.common)
    for name in ("q", "kv_cache"):
        wrong = replace(scene, **{name: getattr(scene, name).double()})
        demand_error(
            (StaleMetadataError, ValueError),
            f"{name} in float64",
            partial(forward, wrong, metadata),
        )
