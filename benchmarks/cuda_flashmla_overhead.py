"""What the adapter adds to the bare library: host time, device time, kernels."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from cuda_flashmla_steps import SCALE, make_problem, make_step, outputs_for

from mla_decode_cuda_flashmla import backend
from mla_decode_cuda_flashmla.forms import SchedMetaForm
from mla_decode_cuda_flashmla.library import library_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuda_flashmla_steps import Step

    from mla_decode import DecodeProblem, DeviceInfo


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch of equal requests, and what is asked of the adapter."""

    H: int
    Q: int
    B: int
    variant: str
    """``plain``: nothing but the output; ``lse``; ``lse+out``: into the caller's."""


SHAPES = tuple(
    Shape(H=heads, Q=query_len, B=batch, variant=variant)
    for heads in (16, 128)
    for query_len in (1, 4)
    for batch in (1, 16, 128)
    for variant in ("plain", "lse", "lse+out")
)
LAYERS = 10
CALLS_A_BURST = 10


def run_overhead(device: DeviceInfo, *, bursts: int, rounds: int, small: bool) -> Any:
    """Paired medians for every shape and variant, in inference mode as engines run."""
    with torch.inference_mode():
        return [
            vars(shape)
            | _host(device, shape, bursts)
            | _device(device, shape, rounds, 256 if small else 4096)
            for shape in SHAPES
            if not small or (shape.H, shape.Q) == (16, 1)
        ]


def run_host(device: DeviceInfo, *, bursts: int, small: bool) -> Any:
    """The host's part of it alone: seconds on a card."""
    with torch.inference_mode():
        return [
            vars(shape) | _host(device, shape, bursts)
            for shape in SHAPES
            if not small or (shape.H, shape.Q, shape.B) == (16, 1, 1)
        ]


def _calls(
    device: DeviceInfo, shape: Shape, seq_len: int
) -> tuple[Callable[[], Any], Callable[[], Any], Step]:
    """The bare call and the adapter's, each over a schedule of its own."""
    heads, query_len, batch = shape.H, shape.Q, shape.B
    problem: DecodeProblem = make_problem(
        num_q_heads=heads,
        query_lens={query_len},
        needs_lse="lse" in shape.variant,
        max_model_len=max(seq_len, 64),
        graphs=True,
    )
    step = make_step(problem, [seq_len] * batch, query_len, device)
    builder = backend.builder_cls(problem, device)
    kernel = library_for(device).dense
    if not isinstance(kernel, SchedMetaForm):
        raise TypeError(f"the bare call is written for sched_meta, not {kernel.form}")
    targets = outputs_for(step) if "out" in shape.variant else {}
    q = step.q.view(batch, query_len, heads, 576)
    cache = step.kv.unsqueeze(2)
    state: dict[str, Any] = {}

    def renew() -> None:
        state["metadata"] = builder.build(step.common)
        state["schedule"] = kernel.plan(step.common.seq_lens, query_len * heads)

    def bare() -> Any:
        return kernel.run(
            q=q,
            k_cache=cache,
            block_table=step.common.block_table_tensor,
            cache_seqlens=step.common.seq_lens,
            head_dim_v=512,
            tile_scheduler_metadata=state["schedule"],
            softmax_scale=SCALE,
            causal=True,
            **kernel.extra,
        )

    def ours() -> Any:
        return backend.forward(
            step.q, step.kv, state["metadata"], softmax_scale=SCALE, **targets
        )

    renew()
    bare.renew = ours.renew = renew  # type: ignore[attr-defined]  # carried along
    return bare, ours, step


def _host(device: DeviceInfo, shape: Shape, bursts: int) -> dict[str, float]:
    """Median host time of a call and of the difference, in us, over short lengths."""
    bare, ours, _ = _calls(device, shape, 64)
    for call in (bare, ours):
        call()
    synchronise(device)
    pairs = []
    gc.disable()
    for number in range(bursts):
        order = (bare, ours) if number % 2 else (ours, bare)
        spent = {}
        for call in order:
            start = time.perf_counter()
            for _ in range(CALLS_A_BURST):
                call()
            spent[call] = (time.perf_counter() - start) / CALLS_A_BURST * 1e6
            synchronise(device)
        pairs.append((spent[bare], spent[ours]))
    gc.enable()
    gaps = sorted(ours_us - bare_us for bare_us, ours_us in pairs)
    low, high = _interval(gaps)
    return {
        "host_bare_us": statistics.median(pair[0] for pair in pairs),
        "host_added_us": statistics.median(gaps),
        "host_added_low": low,
        "host_added_high": high,
    }


def _device(
    device: DeviceInfo, shape: Shape, rounds: int, seq_len: int
) -> dict[str, float]:
    """Paired device time of ten layers and their plan, each captured in a graph."""
    if device.assumed:
        return {}
    bare, ours, _ = _calls(device, shape, seq_len)
    graphs = []
    for call in (bare, ours):
        call()
        call.renew()  # type: ignore[attr-defined]  # set by _calls
        synchronise(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAYERS):
                call()
        graphs.append(graph)
    pairs = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        spent = [0.0, 0.0]
        for which in order:
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
            begin.record()
            graphs[which].replay()
            end.record()
            end.synchronize()
            spent[which] = begin.elapsed_time(end) * 1e3 / LAYERS
        pairs.append(spent)
    ratios = sorted(after / before for before, after in pairs)
    low, high = _interval(ratios)
    return {
        "gpu_bare_us": statistics.median(pair[0] for pair in pairs),
        "gpu_ratio": statistics.median(ratios),
        "gpu_ratio_low": low,
        "gpu_ratio_high": high,
    }


def _interval(ordered: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median, by ranks."""
    count = len(ordered)
    reach = int(0.98 * count**0.5) + 1
    middle = count // 2
    return ordered[max(middle - reach, 0)], ordered[min(middle + reach, count - 1)]


def kernel_names(device: DeviceInfo) -> list[str]:
    """Kernels of a first call with LSE and of a later one, in order of appearance."""
    if device.assumed:
        return []
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - card only

    _, ours, _ = _calls(device, Shape(H=16, Q=4, B=4, variant="lse+out"), 1000)
    synchronise(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        ours()
        ours()
        synchronise(device)
    names = [event.name for event in trace.events() if event.device_time > 0]
    return list(dict.fromkeys(name[:120] for name in names))


def synchronise(device: DeviceInfo) -> None:
    """Wait for the device, where there is one."""
    if not device.assumed:
        torch.cuda.synchronize()
