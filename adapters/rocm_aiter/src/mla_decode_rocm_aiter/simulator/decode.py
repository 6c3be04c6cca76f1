"""`mla_decode_fwd` on a CPU: the gate, the fold, the kernel, and the fold undone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mla_decode_rocm_aiter.resolve import look_up
from mla_decode_rocm_aiter.simulator.machine import Launch
from mla_decode_rocm_aiter.simulator.split_kernel import run_split
from mla_decode_rocm_aiter.simulator.stage1 import (
    KernelCall,
    reduce_partials,
    run_works,
)

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode_rocm_aiter.keys import KernelKey
    from mla_decode_rocm_aiter.simulator.machine import Machine

_UNMASKED_TIE = "mla_a16w16_qh8_qseqlen2_gqaratio8"


def decode(machine: Machine, **call: Any) -> tuple[Tensor, Tensor | None]:
    """Run a decode call; the output goes into `call["o"]`, as far as AITER keeps to it.

    Returns:
        The partial buffer (not the output) and the LSE or None.
    """
    q, cache, o = call["q"], call["kv_buffer"], call["o"]
    if call["logit_cap"] > 0:
        raise AssertionError("logit_cap is not supported")
    heads, block = o.shape[1], call["max_seqlen_q"]
    dtypes = (machine.dtype_name(q.dtype), machine.dtype_name(cache.dtype))
    causal = bool(call.get("causal", True))
    persistent = call["work_meta_data"] is not None and not _drops_schedule(
        machine, call, dtypes
    )
    program = machine.program(dtypes, persistent, causal)
    found = look_up(program, heads, block, bool(call["return_lse"]))
    if isinstance(found, str):
        _fail(machine, found, program.dtypes, heads, block)
    if dtypes[0] == "fp8" and (call["q_scale"] is None or call["kv_scale"] is None):
        machine.die("stage1", "fp8 Q requires q_scale and kv_scale")
    if not q.is_contiguous():
        machine.die("stage1", "only support Q.is_contiguous() for now")
    if persistent and _wants_experimental(machine, dtypes, found, call["page_size"]):
        raise AttributeError("module 'aiter' has no attribute 'hk_mla_decode_fwd'")
    masks = kernel_masks(found, machine, causal=causal)
    launch = Launch(
        key=found,
        kernel=found.kernels[0],
        masks=masks,
        causal=causal,
        works=call["qo_indptr"].shape[0] - 1,
    )
    machine.launches.append(launch)
    if persistent:
        return _run_persistent(machine, found, masks, call)
    return _run_split(machine, found, masks, call)


def kernel_masks(key: KernelKey, machine: Machine, *, causal: bool) -> bool:
    """Whether the kernel of a key masks, which its name says and its call does not.

    gfx942's persistent fp8 kernel of 128 heads does not: there, only the trimmed
    schedule of page size 1 masks.
    """
    if key.q == 1:
        return False
    name = key.kernels[0]
    if name == _UNMASKED_TIE and len(key.kernels) > 1:
        return not machine.faults.unmasked_tie
    if name == _UNMASKED_TIE:
        return False
    if machine.faults.ignores_causal and not causal:
        return True
    return "msk0" not in name


def _drops_schedule(
    machine: Machine, call: dict[str, Any], dtypes: tuple[str, str]
) -> bool:
    """The batch-size gate: from 32 requests on AITER may ignore the schedule."""
    gate = machine.profile.batch_gate
    if gate is None or call["num_kv_splits"] is not None:
        return False
    gate = int(os.environ.get("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", gate))
    return (
        gate > 0
        and machine.arch == "gfx950"
        and dtypes == ("bf16", "bf16")
        and call["o"].shape[1] == 16
        and call["max_seqlen_q"] == 1
        and call["qo_indptr"].shape[0] - 1 >= gate
    )


def _fail(
    machine: Machine, why: str, dtypes: tuple[str, str], heads: int, block: int
) -> NoReturn:
    """Fail as the release fails for this reason."""
    if why == "heads":
        raise AssertionError(f"nhead={heads} and max_seqlen_q={block} not supported")
    if why == "split_table":
        raise KeyError(heads * block)
    if why == "reduce":
        machine.die("reduce", f"kn_mla_reduce_v1 doesn't support #heads: {heads}")
    if why == "q_dtype":
        machine.die("stage1", f"unsupport Q dtype:{dtypes[0]}")
    machine.die(
        "stage1",
        f"cannot get heuristic kernel! q_type:{dtypes[0]} kv_type:{dtypes[1]} "
        f"gqa:{heads} qseqlen:{block}",
    )


def _wants_experimental(
    machine: Machine, dtypes: tuple[str, str], key: KernelKey, page_size: int
) -> bool:
    """Whether AITER_ENABLE_EXPERIMENTAL leads to an operator that is not there."""
    if not (machine.profile.experimental_breaks and machine.experimental()):
        return False
    rows = {128, 64} if machine.arch == "gfx950" else {128}
    return (
        dtypes == ("fp8", "fp8") and key.heads * key.q in rows and page_size in {1, 64}
    )


def _kernel_call(
    machine: Machine, key: KernelKey, masks: bool, call: dict[str, Any], q: Tensor
) -> KernelCall:
    scale = call["sm_scale"] if call["sm_scale"] is not None else q.shape[-1] ** -0.5
    out_scale = 1.0
    if call["kv_scale"] is not None:
        out_scale = float(call["kv_scale"])
    if call["q_scale"] is not None:
        scale *= float(call["q_scale"])
    rounds = machine.faults.rounds_weights and q.dtype == machine.fp8
    return KernelCall(
        q=q,
        cache=call["kv_buffer"],
        query_starts=call["qo_indptr"],
        page_starts=call["kv_indptr"],
        pages=call["kv_indices"],
        last_page_lens=call["kv_last_page_lens"],
        page_size=call["page_size"],
        ratio=key.fold,
        into_query=key.q // call["max_seqlen_q"],
        block=key.q,
        scale=scale * out_scale,
        out_scale=out_scale,
        masks=masks,
        tile=key.gqa * max(key.qseqlen, 1),
        faults=machine.faults,
        rounding=machine.fp8 if rounds else None,
    )


def _run_persistent(
    machine: Machine, key: KernelKey, masks: bool, call: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The schedule is read from where `work_meta_data` points, as the kernel does."""
    q, o = call["q"], call["o"]
    rows, call_heads, width = o.shape
    block, heads = call["max_seqlen_q"], key.heads
    groups = call_heads // heads
    permuted = groups > 1 and block > 1 and key.q == block
    if permuted:
        grouped = q.reshape(rows // block, block, groups, heads, -1)
        q = grouped.permute(0, 2, 1, 3, 4).reshape(rows * groups, heads, -1)
    else:
        q = q.view(rows * groups, heads, -1)
    out = o.view(rows * groups, heads, width)
    lse = None
    if call["return_lse"]:
        lse = torch.empty(rows * groups, heads)
    partials = call["reduce_partial_map"].shape[0] * key.q
    partial = torch.empty(partials, 1, heads, width)
    partial_lse = torch.empty(partials, 1, heads, 1)
    if machine.faults.nan_workspace:
        for tensor in (out, partial, partial_lse, *([lse] if lse is not None else [])):
            tensor.fill_(torch.nan)
    pointers = call["work_meta_data"].view(torch.int64).tolist()
    indptr = machine.memory.read(pointers[0], "work_indptr")
    works = machine.memory.read(pointers[1], "work_info_set")
    kernel = _kernel_call(machine, key, masks, call, q)
    run_works(kernel, works[: int(indptr[-1])].tolist(), partial, partial_lse, out, lse)
    reduce_partials(
        partial,
        partial_lse,
        call["reduce_indptr"],
        call["reduce_final_map"],
        call["reduce_partial_map"],
        out,
        lse,
    )
    if machine.faults.broken_fp8_fold_32 and call_heads == 32 and block > 1:
        out.copy_(out.flip(1))
    if permuted:
        # AITER re-points the caller's tensor object; the caller's memory keeps the
        # permuted rows.
        view = out.reshape(rows // block, groups, block, heads, width)
        straight = view.permute(0, 2, 1, 3, 4).reshape(rows, call_heads, width)
        o.set_(straight.contiguous())
        if lse is not None:
            grouped_lse = lse.reshape(rows // block, groups, block, heads)
            lse = grouped_lse.permute(0, 2, 1, 3).reshape(rows, call_heads)
    elif lse is not None:
        lse = lse.view(rows, call_heads)
    return partial, lse


def _run_split(
    machine: Machine, key: KernelKey, masks: bool, call: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Without a schedule. With one split a fast path returns before the LSE is made."""
    q, o = call["q"], call["o"]
    kernel = _kernel_call(machine, key, masks, call, q)
    lse = torch.full(o.shape[:2], torch.nan)
    run_split(kernel, o, lse)
    one_split = call["num_kv_splits"] == 1 and (
        q.dtype == machine.fp8
        or call["max_seqlen_q"] == 4
        or (q.dtype == call["kv_buffer"].dtype and o.shape[1] in {8, 32})
    )
    if not call["return_lse"]:
        return o, lse.view(*o.shape[:2], 1) if one_split else None
    return o, lse.fill_(torch.nan) if one_split else lse
