"""Decode context parallel on real ranks: values first, then time and the merge's share.

    torchrun --nproc-per-node 2 benchmarks/dcp.py check      # values, empty shards, graph
    torchrun --nproc-per-node 2 benchmarks/dcp.py time       # a step against one rank

Any number of ranks; the collective library follows the device (NCCL on GPUs, gloo on
CPUs). Each rank holds its share of the KV. Rank 0 prints a table, or JSON with the
machine, the date and the versions. On GPUs a step is timed twice: eager, and replayed
from a graph that holds the collective too, which is what engines do.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import statistics
import time
from importlib.metadata import version
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from mla_decode import (
    CommonAttentionMetadata,
    Dcp,
    DecodeProblem,
    DeviceInfo,
    Mask,
    MLADecoder,
    detect_device,
)
from mla_decode.dcp import DcpMerger, local_seq_lens, owned_tokens
from mla_decode.reference.oracle import decode_oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from mla_decode import DecodeOutput

PAGE, SCALE = 64, 192**-0.5
RAGGED = (1, 17, 300, 4097, 0)
"""One token: an empty shard on every rank but the first. Zero: empty everywhere."""
RUN_SECONDS = 0.02
"""About as long is one timed run of steps back to back."""

app = typer.Typer(add_completion=False, help=__doc__)
Backends = Annotated[list[str] | None, typer.Option(help="Names; default: auto.")]


class Rank:
    """This process: its device and its place in the group."""

    def __init__(self) -> None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.is_gpu = torch.cuda.is_available()
        if self.is_gpu:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if self.is_gpu else "gloo")
        self.info: DeviceInfo = detect_device(f"cuda:{local}" if self.is_gpu else "cpu")
        self.device = torch.device(self.info.torch_device)
        self.world, self.rank = dist.get_world_size(), dist.get_rank()

    def dcp(self, interleave: int) -> Dcp:
        """The group of all ranks."""
        return Dcp(world=self.world, rank=self.rank, interleave=interleave)

    def facts(self) -> dict[str, Any]:
        """The machine, the day and the versions."""
        facts: dict[str, Any] = {"ranks": self.world, "device": self.info.arch}
        facts["date"] = str(dt.datetime.now(dt.timezone.utc).date())
        facts["torch"] = torch.__version__
        if not self.is_gpu:
            return {**facts, "library": "gloo"}
        facts["device"] = torch.cuda.get_device_name(self.device)
        facts["triton"] = version("triton")
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return {**facts, "library": f"NCCL {nccl}"}

    def show(self, rows: list[dict[str, Any]], *, as_json: bool, **facts: int) -> None:
        """Print rank 0's rows, with the facts of the run, and leave the group."""
        said = {**self.facts(), **facts}
        if self.rank == 0 and as_json:
            typer.echo(json.dumps({**said, "rows": rows}, indent=2))
        elif self.rank == 0:
            title = ", ".join(f"{name} {value}" for name, value in said.items())
            table = Table(title=title)
            for name in rows[0]:
                table.add_column(name, justify="right")
            for row in rows:
                table.add_row(*map(str, row.values()))
            Console().print(table)
        dist.destroy_process_group()


class Replay:
    """A step captured in a graph, its collective too; calling it replays the graph.

    Every rank of the group must make it at the same time.
    """

    def __init__(self, step: Callable[[], DecodeOutput]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        dist.barrier()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.output = step()

    def __call__(self) -> DecodeOutput:
        """Replay; the output is the same tensors each time."""
        self._graph.replay()
        return self.output


def prepare(
    rank: Rank,
    backend: str,
    rows: list[Tensor],
    q: Tensor,
    query_len: int,
    dcp: Dcp,
    *,
    causal: bool,
    graphs: bool = False,
) -> tuple[DecodeProblem, Callable[[], DecodeOutput]]:
    """A decoder over this rank's share of the requests' KV, and its step."""
    lens = [len(latents) for latents in rows]
    problem = DecodeProblem(
        num_q_heads=q.shape[1],
        page_size=PAGE,
        query_lens=frozenset({query_len}),
        masks=frozenset({Mask.CAUSAL if causal else Mask.NON_CAUSAL}),
        dcp=dcp,
        graphs=graphs,
        max_num_reqs=len(lens),
        max_model_len=max(*lens, query_len),
    )
    decoder = MLADecoder(problem, backend, "exact", device=rank.info)
    width = -(-max(lens) // PAGE)
    table = torch.full((len(lens), width), -1, dtype=torch.int32)
    pages: list[Tensor] = []
    for request, latents in enumerate(rows):
        mine = latents[owned_tokens(len(latents), dcp).to(latents.device)]
        count = -(-len(mine) // PAGE)
        paged = mine.new_full((count * PAGE, mine.shape[-1]), torch.nan)
        paged[: len(mine)] = mine
        table[request, :count] = torch.arange(count, dtype=torch.int32) + sum(
            map(len, pages)
        )
        pages.append(paged.view(count, PAGE, 576))
    cache = torch.cat([*pages, pages[0].new_zeros(1, PAGE, 576)])
    starts = torch.arange(0, (len(lens) + 1) * query_len, query_len, dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    plan = decoder.plan(
        CommonAttentionMetadata(
            query_start_loc=starts.to(rank.device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(rank.device),
            num_reqs=len(lens),
            num_actual_tokens=len(lens) * query_len,
            max_query_len=query_len,
            max_seq_len=max(lens),
            block_table_tensor=table.to(rank.device),
            causal=causal,
            dcp_local_seq_lens=local_seq_lens(seq_lens, dcp).to(rank.device),
        )
    )
    return problem, lambda: decoder.run(q, cache, plan, softmax_scale=SCALE)


def draw(
    rank: Rank, lens: tuple[int, ...], query_len: int, heads: int
) -> tuple[list[Tensor], Tensor]:
    """The same latents and queries on every rank."""
    generator = torch.Generator(rank.device).manual_seed(sum(lens) + query_len)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, device=rank.device)
        return drawn.bfloat16()

    rows = [normal(n, 576) for n in lens]
    return rows, normal(len(lens) * query_len, heads, 576)


@app.command()
def check(
    backend: Backends = None,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compare ragged batches over the group with the float64 oracle."""
    rank = Rank()
    found = []
    blocks = ((1, True), (8, False), (8, True))
    for name, interleave, (query_len, causal) in product(
        backend or ["auto"], (1, 16), blocks
    ):
        if name == "cuda_flashmla" and query_len > 1:
            continue
        lens = tuple(0 if n < query_len else n for n in RAGGED)
        rows, q = draw(rank, lens, query_len, heads)
        merged, replayed = {}, "-"
        for group in (rank.dcp(interleave), Dcp(world=1)):
            problem, attend = prepare(
                rank,
                name,
                rows,
                q,
                query_len,
                group,
                causal=causal,
                graphs=rank.is_gpu,
            )
            if group.world == 1:
                merged["alone"] = attend().out
                continue
            merger = DcpMerger(problem, device=rank.info, scatter_heads=False)
            merged["dcp"] = merger.merge(attend()).out
            if rank.is_gpu:
                replayed = str(replays_equal(attend, merger, merged["dcp"]))
        widest = max(lens)
        whole = torch.zeros(len(lens), widest, 576, dtype=torch.bfloat16)
        for request, latents in enumerate(rows):
            whole[request, : len(latents)] = latents.cpu()
        truth, _ = decode_oracle(
            q.cpu(),
            whole,
            torch.arange(len(lens)).unsqueeze(1),
            torch.tensor(lens),
            torch.arange(0, (len(lens) + 1) * query_len, query_len),
            causal=causal,
            softmax_scale=SCALE,
        )
        errors = {
            which: float((out.cpu().double() - truth).norm() / truth.norm())
            for which, out in merged.items()
        }
        found.append(
            {
                "backend": name,
                "interleave": interleave,
                "Q": query_len,
                "mask": "causal" if causal else "non_causal",
                "rel_error": f"{errors['dcp']:.2e}",
                "one_rank": f"{errors['alone']:.2e}",
                "graph_equal": replayed,
                "ok": errors["dcp"] <= max(1.5 * errors["alone"], 4e-3),
            }
        )
    rank.show(found, as_json=as_json, heads=heads)
    if not all(row["ok"] for row in found):
        raise typer.Exit(1)


def replays_equal(
    attend: Callable[[], DecodeOutput], merger: DcpMerger, expected: Tensor
) -> bool:
    """Whether a captured step, collective included, replays to the same bits."""
    replay = Replay(lambda: merger.merge(attend()))
    replay.output.out.zero_()
    replay()
    torch.cuda.synchronize()
    return torch.equal(replay.output.out, expected)


def step_seconds(rank: Rank, step: Callable[[], object], repeats: int) -> float:
    """Median time of one step, over runs of several steps back to back."""
    times = [run_seconds(rank, step, 2)]
    longest = torch.tensor(times, device=rank.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)  # all ranks must take as many steps
    steps = max(2, min(200, int(RUN_SECONDS / float(longest))))
    return statistics.median(run_seconds(rank, step, steps) for _ in range(repeats))


def run_seconds(rank: Rank, step: Callable[[], object], steps: int) -> float:
    """Time of a step in one run; a step before it makes the ranks start as one."""
    dist.barrier()
    if not rank.is_gpu:
        step()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - begin) / steps
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    step()
    first.record()
    for _ in range(steps):
        step()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / steps


def time_point(
    rank: Rank,
    shape: tuple[str, int, int, int],
    heads: int,
    interleave: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """One row a method: eager, and on GPUs a graph."""
    name, seq, num, query = shape
    rows, q = draw(rank, (seq,) * num, query, heads)

    def prepared(dcp: Dcp) -> tuple[DecodeProblem, Callable[[], DecodeOutput]]:
        return prepare(
            rank, name, rows, q, query, dcp, causal=query == 1, graphs=rank.is_gpu
        )

    problem, decode = prepared(rank.dcp(interleave))
    _, alone = prepared(Dcp(world=1))
    rows.clear()
    merger = DcpMerger(problem, device=rank.info)
    share = heads // rank.world
    mine = slice(rank.rank * share, (rank.rank + 1) * share)

    def whole() -> DecodeOutput:
        return merger.merge(decode())

    for method in ("eager", "graph") if rank.is_gpu else ("eager",):
        steps: list[Callable[[], DecodeOutput]] = [decode, whole, alone]
        if method == "graph":
            steps = [Replay(step) for step in steps]
        decode_s, step_s, alone_s = (step_seconds(rank, s, repeats) for s in steps)
        merged, truth = steps[1]().out.float(), steps[2]().out[:, mine].float()
        yield {
            "backend": name,
            "S": seq,
            "B": num,
            "Q": query,
            "method": method,
            "step_us": round(1e6 * step_s, 1),
            "decode_us": round(1e6 * decode_s, 1),
            "merge_share": round(1 - decode_s / step_s, 3),
            "one_rank_us": round(1e6 * alone_s, 1),
            "speedup": round(alone_s / step_s, 2),
            "rel_diff": f"{float((merged - truth).norm() / truth.norm()):.1e}",
        }


@app.command("time")
def time_steps(
    backend: Backends = None,
    heads: Annotated[int, typer.Option(min=1)] = 128,
    seq_len: Annotated[list[int] | None, typer.Option()] = None,
    num_reqs: Annotated[list[int] | None, typer.Option()] = None,
    query_len: Annotated[
        list[int] | None, typer.Option(help="1 is causal, more is non-causal.")
    ] = None,
    interleave: Annotated[int, typer.Option(min=1)] = 1,
    repeats: Annotated[int, typer.Option(min=3)] = 7,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Time a step of the group against one rank that holds everything."""
    rank = Rank()
    found: list[dict[str, Any]] = []
    shapes = product(
        backend or ["auto"],
        seq_len or (1024, 4096),
        num_reqs or (1, 4),
        query_len or (1, 4),
    )
    for shape in shapes:
        if shape[0] == "cuda_flashmla" and shape[-1] > 1:
            continue
        found += time_point(rank, shape, heads, interleave, repeats)
    rank.show(found, as_json=as_json, heads=heads, interleave=interleave)


if __name__ == "__main__":
    app()
