"""What the benchmark of context parallelism measures with: ranks, steps, graphs, times."""

from __future__ import annotations

import datetime as dt
import json
import os
import statistics
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

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
from mla_decode.dcp import local_seq_lens, owned_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mla_decode import DecodeOutput

PAGE, SCALE = 64, 192**-0.5
RUN_SECONDS = 0.02
"""About as long is one timed run of steps back to back."""


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
        library = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
        if os.environ.get("NCCL_NVLS_ENABLE") == "0":
            library += ", multicast off"
        return {**facts, "library": library}

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
