"""VALIDATE: everything that the host can see is checked before anything is touched."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.errors import BatchError, ContractError
from mla_decode_contract.call import check, decode, forward, output_buffers
from mla_decode_contract.demand import demand_error
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext


@implements("validate.before_writing")
def before_writing(ctx: CaseContext) -> None:
    """Four wrong calls over one pair of poisoned buffers."""
    scene = draw_scene(ctx, ctx.problem(), [20, 45])
    metadata = ctx.builder(scene.problem).build(scene.common)
    out, lse = output_buffers(scene)
    buffers: dict[str, Any] = {"out": out.tensor}
    if lse is not None:
        buffers["lse"] = lse.tensor
    wrong: tuple[dict[str, Any], ...] = (
        {"softmax_scale": -1.0},
        {"q": scene.q[:1]},
        {"kv_cache": scene.kv_cache[..., :512]},
        {"kv_cache": scene.kv_cache.double()},
    )
    for changes in wrong:
        demand_error(
            (ValueError, RuntimeError),
            f"a wrong {', '.join(changes)}",
            partial(forward, scene, metadata, **{**buffers, **changes}),
        )
        require(
            bool(out.tensor.isnan().all()),
            f"out was written before a wrong {', '.join(changes)} was refused",
        )
    check(scene, forward(scene, metadata, **buffers), label="afterwards ")


@implements("validate.errors_carry_their_fix")
def errors_carry_their_fix(ctx: CaseContext) -> None:
    """A batch, an argument and a stale error: each a ContractError with its data."""
    scene = draw_scene(ctx, ctx.problem(), [20, 45])
    builder = ctx.builder(scene.problem)
    metadata = builder.build(scene.common)
    calls = {
        "num_reqs 0": lambda: builder.build(scene.with_common(num_reqs=0)),
        "softmax_scale 0": lambda: forward(scene, metadata, softmax_scale=0.0),
        "a short query": lambda: forward(scene, metadata, q=scene.q[:1]),
    }
    for what, call in calls.items():
        demand_error(ContractError, what, call)


@implements("validate.batch_forms_refused")
def batch_forms(ctx: CaseContext) -> None:
    """One wrong field at a time."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    common, builder = scene.common, ctx.builder(problem)
    wrong: dict[str, dict[str, Any]] = {
        "int64 seq_lens": {"seq_lens": common.seq_lens.long()},
        "seq_lens of another batch": {"seq_lens": common.seq_lens[:1]},
        "int64 query_start_loc_cpu": {
            "query_start_loc_cpu": common.query_start_loc_cpu.long()
        },
        "falling query_start_loc_cpu": {
            "query_start_loc_cpu": torch.tensor([0, 2, 1], dtype=torch.int32)
        },
        "an int64 table": {"block_table_tensor": common.block_table_tensor.long()},
        "a table of one row": {"block_table_tensor": common.block_table_tensor[:1]},
        "no requests": {"num_reqs": 0},
        "more requests than the problem's": {"num_reqs": problem.max_num_reqs + 1},
        "max_seq_len past the problem's": {"max_seq_len": problem.max_model_len + 1},
        "a negative max_seq_len": {"max_seq_len": -1},
        "a max_query_len below the block's": {"max_query_len": 0},
        "tokens that fit no block": {"num_actual_tokens": 7},
    }
    for what, changes in wrong.items():
        batch = scene.with_common(**changes)
        demand_error(BatchError, what, partial(builder.build, batch))


@implements("validate.device_finds_bad_slot")
def device_finds_bad_slot(ctx: CaseContext) -> None:
    """A negative used slot at build; one past the cache at the latest in forward."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    builder = ctx.builder(problem, validate="device")
    check(scene, decode(scene, builder), label="good ")
    for slot in (-1, int(scene.kv_cache.shape[0])):
        table = scene.common.block_table_tensor.clone()
        table[1, 0] = slot
        bad = scene.with_common(block_table_tensor=table)

        def step(common: Any = bad) -> object:
            return forward(scene, builder.build(common))

        demand_error(BatchError, f"a used slot {slot}", step)


@implements("validate.device_finds_bad_length")
def device_finds_bad_length(ctx: CaseContext) -> None:
    """A negative length, and one past max_seq_len."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    builder = ctx.builder(problem, validate="device")
    for length in (-1, 46):
        lens = scene.common.seq_lens.clone()
        lens[1] = length
        bad = scene.with_common(seq_lens=lens)
        demand_error(BatchError, f"a seq_len of {length}", partial(builder.build, bad))


@implements("validate.recovers")
def recovers(ctx: CaseContext) -> None:
    """Good, refused, good: the third step is the first again."""
    problem = ctx.problem()
    builder = ctx.builder(problem)
    scene = draw_scene(ctx, problem, [20, 45])
    check(scene, decode(scene, builder), label="before ")
    bad = scene.with_common(seq_lens=scene.common.seq_lens.long())
    demand_error(BatchError, "int64 seq_lens", lambda: builder.build(bad))
    later = draw_scene(ctx, problem, [33, 46, 2])
    check(later, decode(replace(later), builder), label="after ")
