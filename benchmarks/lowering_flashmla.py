"""What a folded non-causal block costs against FlashMLA's own non-causal call.

    python benchmarks/lowering_flashmla.py --json lowering.json

The adapter is causal-only; with ``lowering="exact"`` it serves a non-causal block of Q
tokens as one token of Q * H heads. The library's kernel has a mask argument, which the
adapter does not expose: that call is the other side of each pair. Both are captured in
a graph of ten layers, plan included, and replayed in turn, order alternating. Values
are compared before anything is timed.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from cuda_flashmla_overhead import _interval as interval
from cuda_flashmla_steps import SCALE, make_problem, make_step
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mla_decode import Candidate, Mask, MLADecoder, detect_device
from mla_decode_cuda_flashmla import backend
from mla_decode_cuda_flashmla.forms import SchedMetaForm
from mla_decode_cuda_flashmla.library import library_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_decode import DeviceInfo

HEADS, QUERY_LENS, BATCHES, SEQ_LENS = (
    (16, 32, 64, 128),
    (2, 4, 8),
    (1, 16, 64),
    (4096, 16384),
)
LAYERS = 10


def measure(
    device: DeviceInfo,
    heads: int,
    query_len: int,
    batch: int,
    seq_len: int,
    rounds: int,
) -> dict[str, Any]:
    """One point: relative difference of the values, median ratio and its interval."""
    problem = make_problem(
        num_q_heads=heads,
        query_lens={query_len},
        masks={Mask.NON_CAUSAL},
        max_num_reqs=batch,
        max_model_len=seq_len,
        graphs=True,
    )
    step = make_step(problem, [seq_len] * batch, query_len, device)
    common = replace(step.common, causal=False)
    candidates = {backend.name: Candidate(name=backend.name, backend=backend)}
    decoder = MLADecoder(
        problem, backend.name, "exact", device=device, candidates=candidates
    )
    kernel = library_for(device).dense
    if not isinstance(kernel, SchedMetaForm):
        raise TypeError(f"the bare call is written for sched_meta, not {kernel.form}")
    q, cache = step.q.view(batch, query_len, heads, 576), step.kv.unsqueeze(2)
    state: dict[str, Any] = {}

    def renew() -> None:
        state["plan"] = decoder.plan(common)
        state["schedule"] = kernel.plan(common.seq_lens, query_len * heads)

    def bare() -> Any:
        return kernel.run(
            q=q,
            k_cache=cache,
            block_table=common.block_table_tensor,
            cache_seqlens=common.seq_lens,
            head_dim_v=512,
            tile_scheduler_metadata=state["schedule"],
            softmax_scale=SCALE,
            causal=False,
            **kernel.extra,
        )

    def folded() -> Any:
        return decoder.run(step.q, step.kv, state["plan"], softmax_scale=SCALE)

    renew()
    truth = bare()[0].reshape(-1, heads, 512).float()
    difference = float((folded().out.float() - truth).norm() / truth.norm())
    ratios, times = _pairs((bare, folded), renew, rounds)
    low, high = interval(ratios)
    return {
        "H": heads,
        "Q": query_len,
        "B": batch,
        "S": seq_len,
        "plan": decoder.selection.plan.kind,
        "library_us": round(times[0], 2),
        "folded_us": round(times[1], 2),
        "ratio": round(statistics.median(ratios), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "rel_difference": difference,
    }


def _pairs(
    calls: tuple[Callable[[], Any], ...], renew: Callable[[], None], rounds: int
) -> tuple[list[float], list[float]]:
    """Sorted ratios of the second call to the first, and each one's median in us."""
    graphs = []
    for call in calls:
        renew()
        call()
        torch.cuda.synchronize()
        renew()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAYERS):
                call()
        graphs.append(graph)
    spent: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[which].replay()
            end.record()
            end.synchronize()
            spent[which].append(begin.elapsed_time(end) * 1e3 / LAYERS)
    ratios = sorted(after / before for before, after in zip(*spent, strict=True))
    return ratios, [statistics.median(times) for times in spent]


def main(
    rounds: Annotated[int, typer.Option(min=5)] = 15,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure every point of the grid on this machine's Hopper GPU."""
    if not torch.cuda.is_available():
        typer.echo("needs a Hopper GPU and a FlashMLA wheel", err=True)
        raise typer.Exit(1)
    device = detect_device()
    grid = list(product(SEQ_LENS, BATCHES, HEADS, QUERY_LENS))
    with torch.inference_mode():
        found = [
            measure(device, heads, query_len, batch, seq_len, rounds)
            for seq_len, batch, heads, query_len in track(
                grid, console=Console(file=sys.stderr)
            )
        ]
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    table = Table(title=f"fold against the library's own mask, {device.name}")
    for name in found[0]:
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(
            *(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
        )
    Console(width=130).print(table)
    ratios = [row["ratio"] for row in found]
    typer.echo(
        f"median {statistics.median(ratios):.4f}, geomean "
        f"{statistics.geometric_mean(ratios):.4f}, worst {max(ratios):.4f}"
    )


if __name__ == "__main__":
    typer.run(main)
