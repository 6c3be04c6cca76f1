"""The Hopper kernel of `triton_mla` against its peers, on the card that runs this.

    python benchmarks/hopper_mla.py check                     # against float64
    python benchmarks/hopper_mla.py points --results r.jsonl --budget-s 120
    python benchmarks/hopper_mla.py kernels                   # each launch by itself
    python benchmarks/hopper_mla.py tune                      # what the numbers are worth
    python benchmarks/hopper_mla.py fp8                       # against our own bf16
    python benchmarks/hopper_mla.py sustain                   # under the power limit
    python benchmarks/hopper_mla.py host                      # build and forward, eager
    python benchmarks/hopper_mla.py table --results r.jsonl

`points` resumes: a point that stands in the results is skipped, and all peers of a point
are measured in the same process, interleaved, so that runs of any length on any number
of machines add up to one table. Method: pages drawn at random from a pool far larger
than the second-level cache, that cache evicted before every repetition, CUDA graph
replay, events, medians. Uniform batches are timed without the work table (one a step,
for all layers), ragged ones with the schedule of both sides.

Peers are taken where they can be imported: FlashMLA and FlashAttention-3 from the
members `vllm/_flashmla_C.abi3.so`, `vllm/third_party/flashmla` and `vllm/vllm_flash_attn`
of a vLLM wheel, on `PYTHONPATH`. A peer that is missing is left out, and said so.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from mla_decode_triton.hopper.launch import HopperStep, Tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SCALE = 576**-0.5
BANDWIDTH, PEAK = 4.3e12, 790e12  # measured on an H200: bytes/s, flop/s
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One shape; `mean` is the length of every request, or a lognormal's mean."""

    heads: int
    query_len: int
    requests: int
    mean: int
    causal: bool
    ragged: bool = False
    seed: int = 0

    def lengths(self) -> list[int]:
        """The batch's lengths."""
        if not self.ragged:
            return [self.mean] * self.requests
        rng = random.Random(self.seed)  # noqa: S311 - not for secrets
        drawn = [
            rng.lognormvariate(math.log(self.mean) - 0.5, 1.0)
            for _ in range(self.requests)
        ]
        return [min(32768, max(64, int(n))) for n in drawn]

    def roofline_us(self) -> float:
        """Least time by bytes read once or by arithmetic."""
        tokens = sum(self.lengths())
        flops = 2 * self.query_len * self.heads * tokens * 1088
        return max(tokens * 1152 / BANDWIDTH, flops / PEAK) * 1e6


def all_points() -> list[Point]:
    """Uniform points of both masks, then ragged ones; shuffled once, so that any prefix is a sample."""
    grid = itertools.product(
        (16, 64, 128), (1, 4, 8), (1, 16, 64, 128), (1024, 4096, 16384), (False, True)
    )
    points = [
        Point(heads=h, query_len=q, requests=b, mean=s, causal=c)
        for h, q, b, s, c in grid
        if q > 1 or c
    ]
    shapes = (
        (16, 1, 64, 8192),
        (16, 4, 128, 4096),
        (64, 4, 16, 8192),
        (128, 1, 64, 8192),
        (128, 1, 128, 4096),
        (128, 4, 64, 4096),
    )
    points += [
        Point(
            heads=h,
            query_len=q,
            requests=b,
            mean=s,
            causal=q > 1,
            ragged=True,
            seed=seed,
        )
        for seed in range(4)
        for h, q, b, s in shapes
    ]
    random.Random(7).shuffle(points)  # noqa: S311 - not for secrets
    return points


class Bench:
    """The pool of pages, and the timer."""

    def __init__(self, pool_tokens: int) -> None:
        self.pool = torch.empty(
            pool_tokens // 64, 64, 576, dtype=torch.bfloat16, device="cuda"
        )
        for chunk in self.pool.view(-1).split(2**28):
            chunk.normal_()
        self._evict = torch.ones(512 * 2**20 // 4, device="cuda")

    def inputs(self, point: Point) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, Q, H, 576], table, lengths."""
        lengths = point.lengths()
        width = -(-max(lengths) // 64)
        # A ragged batch has more slots than the pool has pages: unused ones repeat.
        slots = torch.arange(point.requests * width, device="cuda")
        order = torch.randperm(self.pool.shape[0], device="cuda", dtype=torch.int32)
        pages = order[slots % len(order)]
        q = torch.randn(
            point.requests,
            point.query_len,
            point.heads,
            576,
            dtype=torch.bfloat16,
            device="cuda",
        )
        table = pages.view(point.requests, width).contiguous()
        return q, table, torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def time_us(self, run: Callable[[], Any], repeats: int) -> float:
        """Median of single runs, each after an eviction."""
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        for start, end in events:
            self._evict.sum()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in events) * 1e3


def make_step(point: Point, tuning: Tuning | None = None) -> HopperStep:
    """Buffers for one shape."""
    return HopperStep.alone(
        tuning=tuning or Tuning(),
        max_num_reqs=128,
        query_len=point.query_len,
        num_heads=point.heads,
        device=torch.device("cuda"),
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
    )


def own(
    tuning: Tuning, cache: Tensor | None = None, kv_scale: Tensor | None = None
) -> Callable[..., Callable[[], Tensor]]:
    """This project's kernel, over the pool or another cache of its shape."""

    def make(
        bench: Bench, point: Point, q: Tensor, table: Tensor, lens: Tensor
    ) -> Callable[[], Tensor]:
        step = make_step(point, tuning)
        flat = q.view(-1, point.heads, 576)
        out = torch.empty(
            (flat.shape[0], point.heads, 512), dtype=q.dtype, device="cuda"
        )
        lse = torch.empty((flat.shape[0], point.heads), device="cuda")
        step.build(lens)

        def run() -> Tensor:
            if point.ragged:
                step.build(lens)
            step.forward(
                flat[..., :512],
                flat[..., 512:],
                bench.pool if cache is None else cache,
                table,
                lens,
                out,
                lse,
                softmax_scale=SCALE,
                causal=point.causal,
                kv_scale=kv_scale,
            )
            return out.view(*q.shape[:3], 512)

        return run

    return make


def flash_mla(
    bench: Bench, point: Point, q: Tensor, table: Tensor, lens: Tensor
) -> Callable[[], Tensor]:
    """FlashMLA; its schedule is made by the first call with a metadata object."""
    from vllm.third_party.flashmla.flash_mla_interface import (  # noqa: PLC0415 - a peer
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

    meta = get_mla_metadata()[0]
    cache = bench.pool.unsqueeze(2)

    def run() -> Tensor:
        schedule = get_mla_metadata()[0] if point.ragged else meta
        return flash_mla_with_kvcache(
            q,
            cache,
            table,
            lens,
            512,
            schedule,
            softmax_scale=SCALE,
            causal=point.causal,
        )[0]

    return run


def flash_attention(num_splits: int) -> Callable[..., Callable[[], Tensor]]:
    """FlashAttention-3 as vLLM calls it."""

    def make(
        bench: Bench, point: Point, q: Tensor, table: Tensor, lens: Tensor
    ) -> Callable[[], Tensor]:
        from vllm.vllm_flash_attn.flash_attn_interface import (  # noqa: PLC0415 - a peer
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )

        rows = q.view(-1, point.heads, 576)
        latent, rope = rows[..., :512].contiguous(), rows[..., 512:].contiguous()
        cache = bench.pool.unsqueeze(2)
        starts = (
            torch.arange(point.requests + 1, dtype=torch.int32, device="cuda")
            * point.query_len
        )
        longest = max(point.lengths())

        def schedule() -> Any:
            return get_scheduler_metadata(
                batch_size=point.requests,
                max_seqlen_q=point.query_len,
                max_seqlen_k=longest,
                num_heads_q=point.heads,
                num_heads_kv=1,
                headdim=64,
                cache_seqlens=lens,
                qkv_dtype=q.dtype,
                headdim_v=512,
                page_size=64,
                cu_seqlens_q=starts,
                causal=point.causal,
                num_splits=num_splits,
            )

        kept = schedule()

        def run() -> Tensor:
            out = flash_attn_varlen_func(
                q=rope,
                k=cache[..., 512:],
                v=cache[..., :512],
                q_v=latent,
                max_seqlen_q=point.query_len,
                cu_seqlens_q=starts,
                max_seqlen_k=longest,
                seqused_k=lens,
                block_table=table,
                softmax_scale=SCALE,
                causal=point.causal,
                return_softmax_lse=True,
                fa_version=3,
                num_splits=num_splits,
                scheduler_metadata=schedule() if point.ragged else kept,
            )[0]
            return out.view(*q.shape[:3], 512)

        return run

    return make


PEERS: dict[str, Callable[..., Callable[[], Any]]] = {
    "ours": own(Tuning()),
    "flash_mla": flash_mla,
    "fa3_32": flash_attention(32),
    "fa3_1": flash_attention(1),
}


def graphed(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A captured run and the output that its replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return graph.replay, kept


def measure(bench: Bench, point: Point, names: list[str]) -> dict[str, Any]:
    """All peers of a point, interleaved."""
    torch.manual_seed(point.seed)
    inputs = bench.inputs(point)
    runs = {name: graphed(PEERS[name](bench, point, *inputs)) for name in names}
    outputs = {}
    for name, (replay, kept) in runs.items():
        kept.fill_(float("nan"))
        replay()
        outputs[name] = kept.float()
    norm = outputs["ours"].norm()
    errors = {
        n: ((o - outputs["ours"]).norm() / norm).item() for n, o in outputs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    repeats = max(3, min(10, int(4000 / point.roofline_us())))
    for _ in range(3):
        for name, (replay, _kept) in runs.items():
            times[name].append(bench.time_us(replay, repeats))
    return {
        "point": asdict(point),
        "us": {name: round(statistics.median(t), 2) for name, t in times.items()},
        "difference_to_ours": {
            n: float(f"{e:.1e}") for n, e in errors.items() if n != "ours"
        },
        "roofline_us": round(point.roofline_us(), 2),
    }


def available(bench: Bench) -> list[str]:
    """Peers that run here, on a point of no importance."""
    point = Point(heads=16, query_len=1, requests=2, mean=256, causal=True)
    names = []
    for name, make in PEERS.items():
        try:
            make(bench, point, *bench.inputs(point))()
        except ImportError as error:  # noqa: PERF203 - four times a run
            print(f"left out: {name}: {error}")
        else:
            names.append(name)
    return names


@app.command()
def points(
    results: Path, budget_s: float = 120.0, pool_tokens: int = 128 * 32768
) -> None:
    """Measure what the results lack, until the budget is spent."""
    begun = time.monotonic()
    done = set()
    if results.exists():
        done = {
            json.dumps(json.loads(line)["point"])
            for line in results.read_text().splitlines()
        }
    bench = Bench(pool_tokens)
    names = available(bench)
    device = torch.cuda.get_device_name()
    with results.open("a") as file:
        for point in all_points():
            if json.dumps(asdict(point)) in done:
                continue
            if time.monotonic() - begun > budget_s:
                break
            row = measure(bench, point, names) | {
                "device": device,
                "torch": torch.__version__,
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
    table(results)


@app.command()
def table(results: Path) -> None:
    """Print the results, and how ours stands to the best peer of each point."""
    ratios = []
    for line in results.read_text().splitlines():
        row = json.loads(line)
        p, us = row["point"], row["us"]
        best = min((t for n, t in us.items() if n != "ours"), default=math.nan)
        ratios.append(best / us["ours"])
        kind = "ragged" if p["ragged"] else "uniform"
        mask = "causal" if p["causal"] else "full"
        shown = " ".join(f"{n} {t}" for n, t in us.items())
        print(
            f"{kind} H{p['heads']} Q{p['query_len']} B{p['requests']} S{p['mean']} {mask}: {shown} | {ratios[-1]:.3f}",
            f"roof {row['roofline_us'] / us['ours']:.2f} diff {row['difference_to_ours']}",
        )
    if ratios:
        geomean = statistics.geometric_mean(ratios)
        print(
            f"{len(ratios)} points: geomean {geomean:.3f}, worst {min(ratios):.3f}, >= 1: {sum(r >= 1 for r in ratios)}"
        )


@app.command()
def check(
    seed: Annotated[int, typer.Option(help="of lengths and values")] = 0,
    shard: Annotated[str, typer.Option(help="which of how many, as 0/1")] = "0/1",
) -> None:
    """Compare with float64 on poisoned batches; exit 1 where one disagrees."""
    index, count = (int(part) for part in shard.split("/"))
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    torch.manual_seed(seed)
    failures = 0
    shapes = [(16, 1), (5, 3), (16, 2), (16, 4), (30, 3), (128, 1), (128, 4), (40, 16)]
    cases = list(itertools.product(shapes, (64, 16, 32, 128)))[index::count]
    for (heads, query_len), page in cases:
        dtype = torch.float16 if page == 32 else torch.bfloat16
        for causal in sorted({query_len > 1, False}):
            lens = [
                rng.randint(4096, 9000),
                0,
                rng.randint(16, 63),
                64,
                rng.randint(500, 1500),
                0,
                16,
            ]
            error = _check_one(heads, query_len, page, dtype, lens, causal=causal)
            bad = not error <= 5e-3
            failures += bad
            if bad or page == 64:
                print(
                    f"H{heads} Q{query_len} page {page} {dtype} causal={causal}: {error:.2e}{' WRONG' * bad}"
                )
    print("failures:", failures)
    raise typer.Exit(failures > 0)


def _check_one(
    heads: int,
    query_len: int,
    page: int,
    dtype: torch.dtype,
    lens: list[int],
    *,
    causal: bool,
) -> float:
    """Largest relative error of a request, or infinity where EMPTY, lse or repetition fails."""
    point = Point(
        heads=heads, query_len=query_len, requests=len(lens), mean=1, causal=causal
    )
    rows = query_len * heads
    width = -(-max(lens) // page)
    needed = sum(-(-n // page) for n in lens)
    cache = torch.full((needed + 3, page, 576), math.nan, dtype=dtype, device="cuda")
    table_ = torch.full((len(lens), width), -(2**30), dtype=torch.int32, device="cuda")
    order = torch.randperm(needed + 3).tolist()
    q = torch.randn(len(lens) * query_len, heads, 576, device="cuda").to(dtype)
    keys = {}
    for req, n in enumerate(lens):
        mine = torch.tensor(
            [order.pop() for _ in range(-(-n // page))], dtype=torch.long, device="cuda"
        )
        table_[req, : len(mine)] = mine.to(torch.int32)
        keys[req] = torch.randn(n, 576, device="cuda").to(dtype)
        flat = torch.full((len(mine) * page, 576), math.nan, dtype=dtype, device="cuda")
        flat[:n] = keys[req]
        cache[mine] = flat.view(-1, page, 576)
        if n == 0:
            q[req * query_len : (req + 1) * query_len] = math.nan
    lens_ = torch.tensor(lens, dtype=torch.int32, device="cuda")
    step = make_step(point)
    outs = []
    for _ in range(3):
        out = torch.full((len(q), heads, 512), math.nan, dtype=dtype, device="cuda")
        lse = torch.full((len(q), heads), math.nan, device="cuda")
        step.build(lens_)
        step.forward(
            q[..., :512],
            q[..., 512:],
            cache,
            table_,
            lens_,
            out,
            lse,
            softmax_scale=SCALE,
            causal=causal,
        )
        outs.append((out, lse))
    torch.cuda.synchronize()
    if any(
        not torch.equal(a, b)
        for later in outs[1:]
        for a, b in zip(later, outs[0], strict=True)
    ):
        return math.inf
    worst = 0.0
    out, lse = (x.double().view(len(lens), rows, -1) for x in outs[0])
    for req, n in enumerate(lens):
        if n == 0:
            if out[req].any() or not (lse[req] == -math.inf).all():
                return math.inf
            continue
        scores = (
            q.view(len(lens), rows, 576)[req].double() @ keys[req].double().T * SCALE
        )
        if causal:
            visible = n - query_len + torch.arange(rows, device="cuda") // heads + 1
            scores.masked_fill_(
                torch.arange(n, device="cuda")[None] >= visible[:, None], -math.inf
            )
        expected = scores.softmax(-1) @ keys[req][:, :512].double()
        if not torch.allclose(lse[req, :, 0], scores.logsumexp(-1), atol=1e-3, rtol=0):
            return math.inf
        error = ((out[req] - expected).norm() / expected.norm()).item()
        worst = max(worst, error) if error == error else math.inf  # noqa: PLR0124 - NaN
    return worst


VARIANTS = {
    "in order": Tuning(ahead=False),
    "ahead": Tuning(ahead=True),
    "2 tiles": Tuning(min_tiles=2),
    "4 tiles": Tuning(min_tiles=4),
    "cheap pieces": Tuning(piece_overhead=1, merge_overhead=1),
    "dear pieces": Tuning(piece_overhead=6, merge_overhead=6),
}


@app.command()
def tune() -> None:
    """What the tunable numbers are worth, at shapes where they should matter."""
    bench = Bench(128 * 8192)
    shapes = (
        ((16, 1, 1, 1024), ("2 tiles", "4 tiles")),
        ((16, 1, 1, 4096), ("2 tiles", "4 tiles")),
        ((128, 1, 1, 4096), ("in order", "2 tiles", "4 tiles")),
        ((128, 1, 1, 16384), ("in order", "2 tiles", "4 tiles")),
        ((16, 4, 64, 4096), ("ahead", "cheap pieces", "dear pieces")),
        ((128, 1, 128, 4096), ("in order", "cheap pieces", "dear pieces")),
        ((128, 4, 64, 4096), ("in order",)),
        ((128, 8, 128, 1024), ("in order",)),
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
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(3):
            for name, (replay, _kept) in runs.items():
                times[name].append(bench.time_us(replay, 5))
        shown = {name: round(statistics.median(t), 1) for name, t in times.items()}
        print(f"H{heads} Q{query_len} B{requests} S{mean}", shown)


@app.command()
def fp8() -> None:
    """A bf16 query over an fp8 cache: error, and time against our own bf16 cache."""
    bench = Bench(128 * 16384)
    scale = torch.tensor([0.02], device="cuda")
    small = torch.empty(bench.pool.shape, dtype=torch.float8_e4m3fn, device="cuda")
    for source, target in zip(bench.pool.split(4096), small.split(4096), strict=True):
        target.copy_(source / scale)
    for requests, mean in ((16, 16384), (64, 16384), (128, 16384), (16, 4096)):
        point = Point(heads=16, query_len=1, requests=requests, mean=mean, causal=False)
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
            f"B{requests} S{mean}: bf16 {wide:.1f} us, fp8 {thin:.1f} us,",
            f"{wide / thin:.2f}x, error {error:.1e}",
        )


@app.command()
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


@app.command()
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


@app.command()
def host() -> None:
    """Host time of build and forward, eager, and whether either waits for the device."""
    bench = Bench(128 * 1024)
    point = Point(heads=16, query_len=4, requests=16, mean=1024, causal=True)
    q, table_, lens = bench.inputs(point)
    step, run = make_step(point), own(Tuning())(bench, point, q, table_, lens)
    for name, call in (("build", lambda: step.build(lens)), ("forward", run)):
        samples = []
        for _ in range(50):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(20):
                call()
            samples.append((time.perf_counter() - begun) / 20 * 1e6)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # noqa: SLF001 - torch's only busy kernel
        begun = time.perf_counter()
        call()
        blocked = (time.perf_counter() - begun) * 1e3
        torch.cuda.synchronize()
        print(
            f"{name}: {statistics.median(samples):.1f} us a call; behind a busy device {blocked:.2f} ms"
        )


if __name__ == "__main__":
    app()
