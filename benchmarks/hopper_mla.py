"""The Hopper kernel of `triton_mla` against its peers, on the card that runs this.

    python benchmarks/hopper_mla.py check                     # against float64
    python benchmarks/hopper_mla.py points r.jsonl --budget-s 120
    python benchmarks/hopper_mla.py kernels                   # each launch by itself
    python benchmarks/hopper_mla.py tune                      # what the numbers are worth
    python benchmarks/hopper_mla.py rows                      # programs of 16 rows, or more
    python benchmarks/hopper_mla.py prefetch                  # fp8 tiles asked for ahead
    python benchmarks/hopper_mla.py fp8                       # against our own bf16
    python benchmarks/hopper_mla.py sustain                   # under the power limit
    python benchmarks/hopper_mla.py host                      # build and forward, eager
    python benchmarks/hopper_mla.py table r.jsonl

`points` resumes: a point that stands in the results is skipped, and all peers of a point
are measured in the same process, interleaved, so that runs of any length on any number
of machines add up to one table. Method: pages drawn at random from a pool far larger
than the second-level cache, that cache evicted before every repetition, CUDA graph
replay, events, medians. Uniform batches are timed without the work table (one a step,
for all layers), ragged ones with the schedule of each side, but for FlashInfer's: its
`plan` is 1.5 ms on the host and cannot be captured, so it is not timed, in its favour.

Peers are taken where they can be imported: FlashMLA and FlashAttention-3 from the
members `vllm/_flashmla_C.abi3.so`, `vllm/third_party/flashmla` and `vllm/vllm_flash_attn`
of a vLLM wheel, on `PYTHONPATH`; FlashInfer's fa3 from `flashinfer-python` 0.7.4, whose
kernel is built at first use (nvcc, ninja) or lies in `flashinfer/data/aot`.
`FLASHINFER_DISABLE_JIT=1` forbids the build. A peer that is missing is left out, and
said so.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated, Any

import hopper_studies
import torch
import typer
from hopper_check import worst_error
from hopper_peers import PEERS, Bench, available, graphed
from hopper_points import Point, all_points

app = typer.Typer(add_completion=False, help=__doc__)


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


@app.command()
def points(
    results: Path,
    budget_s: float = 120.0,
    pool_tokens: int = 128 * 32768,
    shard: Annotated[str, typer.Option(help="which of how many, as 0/1")] = "0/1",
) -> None:
    """Measure what the results lack, until the budget is spent."""
    begun = time.monotonic()
    index, count = (int(part) for part in shard.split("/"))
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
        for point in all_points()[index::count]:
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
            error = worst_error(heads, query_len, page, dtype, lens, causal=causal)
            bad = not error <= 5e-3
            failures += bad
            if bad or page == 64:
                print(
                    f"H{heads} Q{query_len} page {page} {dtype} causal={causal}: {error:.2e}{' WRONG' * bad}"
                )
    print("failures:", failures)
    raise typer.Exit(failures > 0)


for study in (
    hopper_studies.tune,
    hopper_studies.rows,
    hopper_studies.prefetch,
    hopper_studies.fp8,
    hopper_studies.sustain,
    hopper_studies.kernels,
    hopper_studies.host,
):
    app.command()(study)

if __name__ == "__main__":
    app()
