"""The child: one call of AITER, compared with the definition. It may die of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mla_decode import DeviceInfo
from mla_decode.dtypes import torch_dtype
from mla_decode_rocm_aiter.installation import DISTRIBUTION
from mla_decode_rocm_aiter.library import Library, load_library
from mla_decode_rocm_aiter.ops import Schedule, build_schedule, mla_decode_fwd

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.probe.shapes import ProbeShape

SEQ_LENS = (10, 70)
"""Two tokens over ten keys: a wrong mask moves a tenth of the weight."""
SCALE = 192**-0.5
TOLERANCE = {"bf16": 0.03, "fp8": 0.12}


def run_shape(shape: ProbeShape, library: Library, device: DeviceInfo) -> str:
    """Call AITER once; returns an empty string, or what is wrong with the values."""
    where = torch.device(device.torch_device)
    generator = torch.Generator().manual_seed(0)
    q_dtype = torch_dtype(shape.q_dtype, device)
    kv_dtype = torch_dtype(shape.kv_dtype, device)
    lens = [length + shape.q for length in SEQ_LENS]
    rows = len(lens) * shape.q
    q = torch.randn(rows, shape.heads, 576, generator=generator).to(q_dtype)
    cache = torch.randn(sum(lens) + 5, 1, 1, 576, generator=generator).to(kv_dtype)
    order = torch.randperm(sum(lens) + 5, generator=generator)[: sum(lens)].int()
    starts = torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32)
    steps = torch.arange(0, rows + 1, shape.q, dtype=torch.int32)
    ones = torch.ones(len(lens), dtype=torch.int32)
    out = torch.full((rows, shape.heads, 512), torch.nan, dtype=torch.bfloat16)
    q_on, cache_on, out, order_on, starts_on, steps_on, ones_on = (
        tensor.to(where) for tensor in (q, cache, out, order, starts, steps, ones)
    )
    names = Schedule.__dataclass_fields__
    info = library.metadata_info(
        len(lens), shape.q, shape.heads, q_dtype, kv_dtype, is_sparse=False
    )
    schedule = Schedule(
        **{
            name: torch.zeros(size, dtype=dtype, device=where)
            for name, (size, dtype) in zip(names, info, strict=True)
        }
    )
    build_schedule(
        library,
        schedule,
        qo_indptr=steps_on,
        kv_indptr=starts_on,
        kv_last_page_lens=ones_on,
        num_heads=shape.heads,
        causal=shape.causal,
        query_len=shape.q,
        dtype_q=q_dtype,
        dtype_kv=kv_dtype,
    )
    one = torch.ones(1, device=where)
    lse = mla_decode_fwd(
        q_on,
        cache_on,
        out,
        steps_on,
        starts_on,
        order_on,
        ones_on,
        shape.q,
        sm_scale=SCALE,
        schedule=schedule,
        num_kv_splits=library.cus,
        q_scale=one if shape.q_dtype == "fp8" else None,
        kv_scale=one if shape.kv_dtype == "fp8" else None,
        return_lse=shape.lse,
        causal=shape.causal,
        library=library,
    )
    keys = [
        cache[order[start:end].long()].double().reshape(-1, 576)
        for start, end in ((0, lens[0]), (lens[0], sum(lens)))
    ]
    right = [
        _definition(q[at * shape.q :][: shape.q], keys[at], shape) for at in (0, 1)
    ]
    return _compare(out.cpu(), lse, right, shape)


def _definition(
    q: torch.Tensor, keys: torch.Tensor, shape: ProbeShape
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("qhd,kd->qhk", q.double(), keys) * SCALE
    if shape.causal:
        last = keys.shape[0] - shape.q + torch.arange(shape.q)
        hidden = torch.arange(keys.shape[0])[None, :] > last[:, None]
        scores = scores.masked_fill(hidden[:, None, :], -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    return (
        torch.einsum("qhk,kd->qhd", weights, keys[:, :512]),
        torch.logsumexp(scores, dim=-1),
    )


def _compare(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    right: list[tuple[torch.Tensor, torch.Tensor]],
    shape: ProbeShape,
) -> str:
    values = torch.cat([part for part, _ in right])
    error = (out.double() - values).abs() / (values.abs() + 0.1)
    limit = TOLERANCE["fp8" if shape.q_dtype == "fp8" else "bf16"]
    worst = float(error.nan_to_num(torch.inf).max())
    if worst > 10 * limit or float(error.nan_to_num(torch.inf).mean()) > limit:
        return f"values are off by up to {worst:.3g}"
    if lse is not None:
        sums = torch.cat([part for _, part in right])
        off = float((lse.cpu().double() - sums).abs().nan_to_num(torch.inf).max())
        if off > limit:
            return f"the LSE is off by up to {off:.3g}"
    return ""


def try_shape(shape: ProbeShape, simulated: dict[str, Any] | None) -> tuple[str, str]:
    """Call AITER and say what became of it, for those who live to.

    Args:
        shape: What to try.
        simulated: Of a simulated AITER, whose aborts are real; None uses the GPU.

    Returns:
        `works`, `wrong` or `raises`, and the detail.
    """
    if simulated is not None:
        from mla_decode_rocm_aiter.simulator import (  # noqa: PLC0415 - only where simulated
            Faults,
            Machine,
            install,
        )

        arch, release = simulated["arch"], simulated["release"]
        faults = Faults(**simulated.get("faults", {}))
        install(Machine(arch=arch, release=release, abort="native", faults=faults))
        device = DeviceInfo.assume(arch, libraries={DISTRIBUTION: release})
    else:
        from mla_decode import detect_device  # noqa: PLC0415 - asks torch for the GPU

        device = detect_device()
    try:
        detail = run_shape(shape, load_library(device), device)
    except Exception as error:  # noqa: BLE001 - whatever AITER raises is the outcome
        return "raises", f"{type(error).__name__}: {error}"
    return ("wrong" if detail else "works"), detail
