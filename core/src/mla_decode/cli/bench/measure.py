"""Timing one backend at one point: through the decoder, as an engine calls it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mla_decode.cli.bench.points import Row
from mla_decode.cli.explain import outdated_refusal
from mla_decode.decoder import MLADecoder
from mla_decode.dtypes import torch_dtype
from mla_decode.errors import BackendRefused, OutdatedLibraryError
from mla_decode.mask import Mask
from mla_decode.metadata import CommonAttentionMetadata
from mla_decode.problem import ROW_WIDTH, DecodeProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from mla_decode.cli.bench.points import Point
    from mla_decode.device import DeviceInfo
    from mla_decode.discovery import Candidate
    from mla_decode.selection import Lowering
SOFTMAX_SCALE = 192**-0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One batch on its device; pages lie in random order."""

    problem: DecodeProblem
    common: CommonAttentionMetadata
    q: Tensor
    kv: Tensor
    scales: Mapping[str, Tensor]


def make_step(point: Point, device: DeviceInfo, seed: int = 0) -> Step:
    """Random query and cache of a point."""
    where = torch.device(device.torch_device)
    layout = point.layout
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-seq_len // layout.page_size) for seq_len in point.seq_lens]
    pages = torch.randperm(sum(counts), generator=generator, dtype=torch.int32)
    table = torch.zeros((point.batch, max(counts)), dtype=torch.int32)
    for row, part in zip(table, torch.split(pages, counts), strict=True):
        row[: len(part)] = part
    tokens = point.batch * point.query_len
    shape = (sum(counts), layout.page_size, ROW_WIDTH)
    scale = torch.ones(1, device=where)
    scales = {"q_scale": scale} if layout.dtype == "fp8" else {}
    if layout.kv_dtype == "fp8":
        scales["kv_scale"] = scale
    return Step(
        problem=DecodeProblem(
            num_q_heads=point.num_heads,
            q_dtype=layout.dtype,
            kv_dtype=layout.kv_dtype,
            out_dtype="bf16" if layout.dtype == "fp8" else layout.dtype,
            page_size=layout.page_size,
            query_lens=frozenset({point.query_len}),
            masks=frozenset({Mask.CAUSAL if point.causal else Mask.NON_CAUSAL}),
            max_num_reqs=point.batch,
            max_model_len=max(point.seq_lens),
        ),
        common=_common(
            point.seq_lens, point.query_len, table.to(where), causal=point.causal
        ),
        q=_random((tokens, point.num_heads, ROW_WIDTH), layout.dtype, device),
        kv=_random(shape, layout.kv_dtype, device),
        scales=scales,
    )


def flatten(step: Step) -> Step:
    """The same values by one request a token: what engines do without block kernels.

    Under a causal mask a token's request ends at the token itself.
    """
    query_len = step.common.max_query_len
    ends = [
        seq_len - (query_len - 1 - token if step.common.causal else 0)
        for seq_len in step.common.seq_lens.tolist()
        for token in range(query_len)
    ]
    table = step.common.block_table_tensor.repeat_interleave(query_len, dim=0)
    return replace(
        step,
        problem=replace(
            step.problem,
            query_lens=frozenset({1}),
            masks=frozenset({Mask.CAUSAL}),
            max_num_reqs=len(ends),
        ),
        common=_common(ends, 1, table, causal=True),
    )


def measure(
    point: Point,
    name: str,
    device: DeviceInfo,
    *,
    candidates: Mapping[str, Candidate],
    lowering: Lowering,
    repeats: int,
) -> Row:
    """Time a backend at a point, and over the point's flatten; a refusal is a row."""
    backend = candidates[name].backend
    evidence = "not installed" if backend is None else backend.evidence(device)
    row = Row(backend=name, evidence=evidence, point=point)
    step = make_step(point, device)
    try:
        kind, us = _time_step(step, name, device, candidates, lowering, repeats)
    except BackendRefused as refused:
        return replace(row, refusals=refused.refusals)
    except OutdatedLibraryError as outdated:
        return replace(row, refusals=(outdated_refusal(outdated),))
    flat_us = None
    if point.query_len > 1:
        flat = flatten(step)
        try:
            _, flat_us = _time_step(flat, name, device, candidates, lowering, repeats)
        except BackendRefused:
            flat_us = None
    return replace(row, lowering=kind, us=us, flatten_us=flat_us)


def copy_bandwidth(device: DeviceInfo) -> float:
    """GB/s that a copy moves here, read and written: the ceiling of the heat map."""
    size = 32 << 20 if device.torch_device == "cpu" else 1 << 30
    source = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * size / time_calls(lambda: target.copy_(source), device, 5) / 1e3


def time_calls(call: Callable[[], object], device: DeviceInfo, repeats: int) -> float:
    """Median microseconds of a call, warmed up; on a GPU by events, L2 evicted."""
    if device.torch_device != "cpu":  # pragma: no cover - needs a GPU
        from triton.testing import do_bench  # noqa: PLC0415 - comes with a GPU's torch

        return 1e3 * float(do_bench(call, return_mode="median"))
    for _ in range(2):
        call()
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return 1e6 * statistics.median(took)


def _time_step(
    step: Step,
    name: str,
    device: DeviceInfo,
    candidates: Mapping[str, Candidate],
    lowering: Lowering,
    repeats: int,
) -> tuple[str, float]:
    decoder = MLADecoder(
        step.problem, name, lowering, device=device, candidates=candidates
    )
    plan = decoder.plan(step.common)
    out = decoder.run(
        step.q, step.kv, plan, softmax_scale=SOFTMAX_SCALE, **step.scales
    ).out

    def call() -> object:
        return decoder.run(
            step.q, step.kv, plan, softmax_scale=SOFTMAX_SCALE, out=out, **step.scales
        )

    return decoder.selection.plan.kind, time_calls(call, device, repeats)


def _common(
    seq_lens: tuple[int, ...] | list[int],
    query_len: int,
    table: Tensor,
    *,
    causal: bool,
) -> CommonAttentionMetadata:
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32) * query_len
    return CommonAttentionMetadata(
        query_start_loc=starts.to(table.device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=table.device),
        num_reqs=len(seq_lens),
        num_actual_tokens=len(seq_lens) * query_len,
        max_query_len=query_len,
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        causal=causal,
    )


def _random(shape: tuple[int, ...], dtype: str, device: DeviceInfo) -> Tensor:
    values = torch.randn(shape, dtype=torch.bfloat16, device=device.torch_device)
    return values.to(torch_dtype(dtype, device))
