"""`get_mla_metadata_info_v1` and `get_mla_metadata_v1` on a CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from mla_decode_rocm_aiter.simulator.faults import SimulatedMemoryFault
from mla_decode_rocm_aiter.simulator.folding import fold_for_schedule
from mla_decode_rocm_aiter.simulator.planner import Planner, PlanRequest
from mla_decode_rocm_aiter.sizes import buffer_sizes
from mla_decode_rocm_aiter.tiling import schedule_tile_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mla_decode_rocm_aiter.simulator.machine import Machine
    from mla_decode_rocm_aiter.simulator.planner import Plan


def metadata_info(machine: Machine, **call: Any) -> tuple[tuple[Any, torch.dtype], ...]:
    """Shapes and dtypes of the schedule's six buffers, in AITER's order."""
    heads, q = call["num_head_qo"], call["max_seqlen_qo"]
    if heads % 8:
        raise AssertionError
    if call["is_sparse"] or call["intra_batch_mode"] or not call["fast_mode"]:
        raise NotImplementedError("the simulator plans dense decodes in fast mode")
    sizes = buffer_sizes(
        machine.arch,
        call["batch_size"],
        heads,
        q,
        (machine.dtype_name(call["q_dtype"]), machine.dtype_name(call["kv_dtype"])),
        machine.cus,
        call.get("max_split_per_batch", -1),
    )
    return (
        (2, torch.uint64),
        (sizes.work_indptr, torch.int32),
        ((sizes.works, 8), torch.int32),
        (sizes.reduce_indptr, torch.int32),
        ((sizes.tiles, 2), torch.int32),
        (sizes.partials, torch.int32),
    )


def build_schedule(machine: Machine, **call: Any) -> None:
    """Plan a step and write the six buffers in place."""
    if call["topk"] >= 0 or call["intra_batch_mode"] or not call["fast_mode"]:
        raise NotImplementedError("the simulator plans dense decodes in fast mode")
    for name in ("kv_granularity", "page_size"):
        if call[name] & (call[name] - 1):
            machine.die("metadata", f"get_mla_metadata_v1: {name} must be a power of 2")
    for name in ("seqlens_qo_indptr", "seqlens_kv_indptr", "kv_last_page_lens"):
        if call[name].dtype != torch.int32 or call[name].stride(0) != 1:
            machine.die("metadata", f"get_mla_metadata_v1: {name} must be int32, dense")
    heads = call["num_heads_per_head_k"] * call["num_heads_k"]
    max_q = call["max_seqlen_qo"]
    dtypes = (
        _name(machine, call, "dtype_q_nope", "dtype_q"),
        _name(machine, call, "dtype_kv_nope", "dtype_kv"),
    )
    fold = fold_for_schedule(machine.profile, machine.arch, dtypes, heads, max_q)
    if fold is None:
        machine.die(
            "metadata", f"get_mla_metadata_v1: no schedule for {heads} heads, q {max_q}"
        )
    batch = call["seqlens_kv_indptr"].shape[0] - 1
    limit = call["max_split_per_batch"]
    splits = machine.cus
    if limit >= 0:
        splits = min(splits, limit * batch * fold.ratio)
    planner = Planner(
        PlanRequest(
            page_starts=tuple(call["seqlens_kv_indptr"].tolist()),
            last_page_lens=tuple(call["kv_last_page_lens"].tolist()),
            query_starts=tuple(call["seqlens_qo_indptr"].tolist()),
            page_size=call["page_size"],
            granularity=call["kv_granularity"],
            heads=fold.heads,
            call_heads=heads,
            ratio=fold.ratio,
            max_q=max_q,
            uniform_q=call["uni_seqlen_qo"] * fold.into_query,
            tile_rows=schedule_tile_rows(
                machine.profile, machine.arch, dtypes, fold.heads, max_q
            ),
            causal=bool(call["is_causal"]),
            round_robin=bool(call.get("is_cp_round_robin", False)),
            cus=machine.cus,
            splits=splits,
        )
    )
    in_parallel = (
        machine.profile.parallel_planner
        and os.environ.get("AITER_MLA_META_USE_PARALLEL", "1") != "0"
        and max_q == 1
        and not planner.is_tiled
        and call["page_size"] == 1
        and fold.ratio == 1
    )
    plan = planner.run_parallel() if in_parallel else planner.run()
    machine.schedules += 1
    write_plan(machine, plan, call)


def _name(machine: Machine, call: dict[str, Any], *words: str) -> str:
    """The dtype that the call names, or AITER's default: bf16."""
    for word in words:
        if call.get(word) is not None:
            return machine.dtype_name(call[word])
    return "bf16"


def write_plan(machine: Machine, plan: Plan, buffers: dict[str, Any]) -> None:
    """Copy a plan into the caller's buffers, which must be long enough."""
    works: Tensor = buffers["work_info_set"]
    indptr: Tensor = buffers["work_indptr"]
    pointers = buffers["work_metadata_ptrs"].view(torch.int64)
    pointers[0] = machine.memory.note(indptr)
    pointers[1] = machine.memory.note(works)
    _fill(works, plan.works, "work_info_set")
    _fill(indptr, plan.work_indptr, "work_indptr")
    starts: Tensor = buffers["reduce_indptr"]
    _fill(starts, plan.reduce_indptr, "reduce_indptr")
    starts[len(plan.reduce_indptr) :] = plan.reduce_indptr[-1]
    final: Tensor = buffers["reduce_final_map"]
    for tile, rows in plan.final_map.items():
        if tile >= final.shape[0]:
            raise SimulatedMemoryFault("the planner writes past reduce_final_map")
        final[tile] = torch.tensor(rows, dtype=torch.int32)
    _fill(buffers["reduce_partial_map"], plan.partial_map, "reduce_partial_map")


def _fill(buffer: Tensor, values: Sequence[Any], name: str) -> None:
    if len(values) > buffer.shape[0]:
        raise SimulatedMemoryFault(
            f"the planner writes {len(values)} entries into {name} of {buffer.shape[0]}"
        )
    if values:
        buffer[: len(values)] = torch.tensor(values, dtype=torch.int32)
