"""Studies of the Hopper kernel alone: its tunables, fp8, power, launches, the host."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from typing import TYPE_CHECKING

import torch
from hopper_peers import PEERS, SCALE, Bench, available, graphed, make_step, own
from hopper_points import Point

from mla_decode import CommonAttentionMetadata, DecodeProblem, Mask
from mla_decode_triton import chosen_backend
from mla_decode_triton.hopper.grid import rows_of_program
from mla_decode_triton.hopper.variants import Tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

VARIANTS = {
    "2 tiles": Tuning(min_tiles=2),
    "4 tiles": Tuning(min_tiles=4),
    "cheap pieces": Tuning(piece_overhead=1, merge_overhead=1),
    "dear pieces": Tuning(piece_overhead=6, merge_overhead=6),
}


def tune() -> None:
    """What the tunable numbers are worth, at shapes where they should matter."""
    bench = Bench(128 * 8192)
    shapes = (
        ((16, 1, 1, 1024), ("2 tiles", "4 tiles")),
        ((16, 1, 1, 4096), ("2 tiles", "4 tiles")),
        ((128, 1, 1, 4096), ("2 tiles", "4 tiles")),
        ((128, 1, 1, 16384), ("2 tiles", "4 tiles")),
        ((16, 4, 64, 4096), ("cheap pieces", "dear pieces")),
        ((128, 1, 128, 4096), ("cheap pieces", "dear pieces")),
    )
    for (heads, query_len, requests, mean), names in shapes:
        point = Point(
            heads=heads,
            query_len=query_len,
            requests=requests,
            mean=mean,
            causal=True,
        )
        inputs = bench.inputs(point)
        runs = {"default": graphed(own(Tuning())(bench, point, *inputs))}
        runs |= {n: graphed(own(VARIANTS[n])(bench, point, *inputs)) for n in names}
        print(f"H{heads} Q{query_len} B{requests} S{mean}", _in_turn(bench, runs))


FP8_SHAPES = (
    *((16, 16, 16384), (16, 64, 16384), (16, 128, 16384), (16, 16, 4096)),
    *((64, 16, 16384), (64, 64, 16384), (128, 16, 16384), (128, 64, 16384)),
)
"""Heads, requests, tokens."""


def fp8() -> None:
    """A bf16 query over an fp8 cache: error, and time against our own bf16 cache."""
    bench, small, scale = _with_fp8(128 * 16384)
    for heads, requests, mean in FP8_SHAPES:
        point = Point(
            heads=heads, query_len=1, requests=requests, mean=mean, causal=False
        )
        q, table_, lens = bench.inputs(point)
        inputs = q, table_, lens
        runs = [
            graphed(own(Tuning())(bench, point, *inputs)),
            graphed(own(Tuning(), small, scale)(bench, point, *inputs)),
        ]
        replay, out = runs[1]
        out.fill_(math.nan)
        replay()
        pages = small.view(torch.uint8)[table_[0].long()].view(small.dtype)
        keys = pages.view(-1, 576)[:mean].double() * scale.double()
        weights = (q[0, 0].double() @ keys.T * SCALE).softmax(-1)
        expected = weights @ keys[:, :512]
        error = ((out[0, 0].double() - expected).norm() / expected.norm()).item()
        times = [bench.time_us(replay, 7) for _ in range(3) for replay, _kept in runs]
        wide, thin = (statistics.median(times[k::2]) for k in range(2))
        print(
            f"H{heads} B{requests} S{mean}: bf16 {wide:.1f} us, fp8 {thin:.1f} us,",
            f"{wide / thin:.2f}x, error {error:.1e}",
        )


ROWS_SHAPES = (
    *((64, 4, 1, 256), (64, 4, 1, 1024), (128, 1, 1, 1024), (16, 4, 2, 4096)),
    *((128, 1, 16, 256), (128, 1, 4, 1024), (128, 1, 2, 4096), (16, 4, 1, 16384)),
    *((64, 4, 4, 1024), (128, 4, 8, 256), (128, 1, 1, 16384)),
)
"""Heads, block, requests, tokens, around where `choose_rows` changes its mind."""


def rows() -> None:
    """Programs of 16 rows beside the usual ones, over bf16 and fp8 caches."""
    bench, small, scale = _with_fp8(64 * 4096)
    for heads, query_len, requests, mean in ROWS_SHAPES:
        point = Point(
            heads=heads,
            query_len=query_len,
            requests=requests,
            mean=mean,
            causal=query_len > 1,
        )
        inputs = bench.inputs(point)
        usual = rows_of_program(heads * query_len)
        runs = {
            f"{kind} {count}": graphed(
                own(Tuning(), *cache, rows=count)(bench, point, *inputs)
            )
            for kind, cache in (("bf16", ()), ("fp8", (small, scale)))
            for count in (usual, 16)
        }
        print(f"H{heads} Q{query_len} B{requests} S{mean}", _in_turn(bench, runs))


def prefetch() -> None:
    """How many tiles ahead many rows ask an fp8 cache into the second-level cache."""
    bench, small, scale = _with_fp8(64 * 16384)
    for heads, requests, mean in ((64, 16, 16384), (64, 64, 4096), (128, 16, 16384)):
        point = Point(
            heads=heads, query_len=1, requests=requests, mean=mean, causal=False
        )
        inputs = bench.inputs(point)
        runs = {
            f"{ahead} ahead": graphed(
                own(Tuning(prefetch=ahead), small, scale)(bench, point, *inputs)
            )
            for ahead in range(5)
        }
        print(f"H{heads} B{requests} S{mean}", _in_turn(bench, runs))


def _with_fp8(pool_tokens: int) -> tuple[Bench, Tensor, Tensor]:
    """A pool, the same as fp8, and what that is times."""
    bench = Bench(pool_tokens)
    scale = torch.tensor([0.02], device="cuda")
    small = torch.empty(bench.pool.shape, dtype=torch.float8_e4m3fn, device="cuda")
    for source, target in zip(bench.pool.split(4096), small.split(4096), strict=True):
        target.copy_(source / scale)
    return bench, small, scale


def _in_turn(
    bench: Bench, runs: dict[str, tuple[Callable[[], None], Tensor]]
) -> dict[str, float]:
    """Medians of three turns, us."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, (replay, _kept) in runs.items():
            times[name].append(bench.time_us(replay, 7))
    return {name: round(statistics.median(found), 1) for name, found in times.items()}


def sustain(seconds: float = 1.2) -> None:
    """Back to back until the power limit rules: median of each peer's second half."""
    bench = Bench(128 * 16384)
    names = available(bench)
    shapes = ((128, 1, 128, 4096), (128, 4, 64, 4096), (128, 8, 16, 16384))
    for heads, query_len, requests, mean in (*shapes, (16, 1, 128, 16384)):
        point = Point(
            heads=heads,
            query_len=query_len,
            requests=requests,
            mean=mean,
            causal=True,
        )
        inputs = bench.inputs(point)
        burst = max(1, int(15000 / point.roofline_us()))
        shown = {}
        for name in names:
            replay, _kept = graphed(PEERS[name](bench, point, *inputs))
            samples = []
            watts = []
            begun = time.monotonic()
            while time.monotonic() - begun < seconds:
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(burst):
                    replay()
                end.record()
                end.synchronize()
                samples.append(start.elapsed_time(end) * 1e3 / burst)
                watts.append(torch.cuda.power_draw() / 1e3)
            half = len(samples) // 2
            us, power = (statistics.median(x[half:]) for x in (samples, watts))
            shown[name] = f"{us:.1f} us at {power:.0f} W"
        print(f"H{heads} Q{query_len} B{requests} S{mean}", shown)


def kernels() -> None:
    """Duration of every launch of a step, by the profiler."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - this command's

    bench = Bench(128 * 4096)
    shapes = (
        (16, 1, 1, 4096),
        (128, 1, 1, 4096),
        (16, 1, 64, 4096),
        (16, 4, 16, 4096),
        (128, 1, 128, 4096),
        (128, 4, 64, 4096),
    )
    for heads, query_len, requests, mean in shapes:
        point = Point(
            heads=heads, query_len=query_len, requests=requests, mean=mean, causal=True
        )
        q, table_, lens = bench.inputs(point)
        run = own(Tuning())(bench, point, q, table_, lens)
        step = make_step(point)
        step.build(lens)
        run()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(8):
                bench._evict.sum()  # noqa: SLF001 - the same module
                step.build(lens)
                run()
            torch.cuda.synchronize()
        spent = {
            e.key: round(e.self_device_time_total / e.count, 1)
            for e in profiler.key_averages()
            if e.key.endswith("_kernel")
        }
        print(f"H{heads} Q{query_len} B{requests} S{mean}", spent)


def host(rounds: int = 100, calls_timed: int = 20) -> None:
    """Host time of build and forward, eager, and whether either waits for the device.

    By themselves, and through the contract: core's checks and the outputs it allocates.
    A host may run at two speeds for seconds: all calls take turns, so that what is
    compared ran at the same ones, and the fastest tenth says what the faster one gives.
    """
    bench = Bench(128 * 1024)
    point = Point(heads=16, query_len=4, requests=16, mean=1024, causal=True)
    calls = _host_calls(bench, point)
    for call in calls.values():
        for _ in range(3):  # what is compiled or known afterwards is not timed
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(calls_timed):
                call()
            times[name].append((time.perf_counter() - begun) / calls_timed * 1e6)
    for name, call in calls.items():
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # noqa: SLF001 - torch's only busy kernel
        begun = time.perf_counter()
        call()
        blocked = (time.perf_counter() - begun) * 1e3
        torch.cuda.synchronize()
        fast = statistics.quantiles(times[name], n=10)[0]
        print(
            f"{name}: {statistics.median(times[name]):.1f} us a call, "
            f"{fast:.1f} in the fastest tenth; behind a busy device {blocked:.2f} ms"
        )


def _host_calls(bench: Bench, point: Point) -> dict[str, Callable[[], object]]:
    """The calls whose host time is of interest, by what they are."""
    q, table, lens = bench.inputs(point)
    step = make_step(point)
    rows = q.view(-1, point.heads, 576)
    out = torch.empty((*rows.shape[:2], 512), dtype=q.dtype, device="cuda")
    lse = torch.empty(rows.shape[:2], device="cuda")

    def forward() -> None:
        step.forward(
            *(rows, None, bench.pool, table, lens, out, lse),
            softmax_scale=SCALE,
            causal=True,
        )

    calls: dict[str, Callable[[], object]] = {
        "build, the step alone": lambda: step.build(lens),
        "forward, the step alone, put together anew": forward,
        "an output allocated": lambda: torch.empty(
            out.shape, dtype=out.dtype, device="cuda"
        ),
    }
    kinds = (
        *itertools.product(("hopper", "portable"), (False, True), (1,)),
        *(("hopper", True, 2), ("portable", True, 2)),
    )
    for kernel, graphs, widths in kinds:
        words = f", {kernel} by contract{' for graphs' * graphs}"
        words += " from a table of half the width" * (widths > 1)
        made = _contract_calls(
            *(bench, point, q, table, lens),
            kernel=kernel,
            graphs=graphs,
            max_model_len=widths * table.shape[1] * bench.pool.shape[1],
        )
        calls |= {name + words: call for name, call in made.items()}
    return calls


def _contract_calls(
    bench: Bench,
    point: Point,
    q: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    kernel: str,
    graphs: bool,
    max_model_len: int,
) -> dict[str, Callable[[], object]]:
    """A build and a layer as an engine calls them; the outputs are the caller's or not."""
    problem = DecodeProblem(
        num_q_heads=point.heads,
        page_size=bench.pool.shape[1],
        query_lens=frozenset({point.query_len}),
        masks=frozenset({Mask.CAUSAL}),
        needs_lse=True,
        max_num_reqs=128,
        max_model_len=max_model_len,
        graphs=graphs,
    )
    backend = chosen_backend(kernel)
    builder = backend.builder_cls(problem, "cuda")
    rows = q.view(-1, point.heads, 576)
    starts = torch.arange(point.requests + 1, dtype=torch.int32) * point.query_len
    common = CommonAttentionMetadata(
        query_start_loc=starts.cuda(),
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=point.requests,
        num_actual_tokens=rows.shape[0],
        max_query_len=point.query_len,
        max_seq_len=max(point.lengths()),
        block_table_tensor=table,
        causal=True,
    )
    out = torch.empty((*rows.shape[:2], 512), dtype=q.dtype, device="cuda")
    outputs = {"out": out, "lse": torch.empty(rows.shape[:2], device="cuda")}
    built = [builder.build(common)]

    def build() -> None:
        built[0] = builder.build(common)

    def forward(**words: Tensor) -> object:
        return backend.forward(rows, bench.pool, built[0], softmax_scale=SCALE, **words)

    def first() -> None:
        build()
        forward(**outputs)

    return {
        "build": build,
        "forward": forward,
        "forward into the caller's outputs": lambda: forward(**outputs),
        "build and a first forward into them": first,
    }
