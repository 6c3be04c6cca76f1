"""Decode context parallel on real ranks: values first, then time and the merge's share.

    torchrun --nproc-per-node 2 benchmarks/dcp.py check      # values, empty shards, graph
    torchrun --nproc-per-node 2 benchmarks/dcp.py time       # a step against one rank

Any number of ranks; the collective library follows the device (NCCL on GPUs, gloo on
CPUs). Each rank holds its share of the KV. Rank 0 prints a table, or JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable  # noqa: TC003 - typer reads annotations
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
    from torch import Tensor

    from mla_decode import DecodeOutput

PAGE, SCALE = 64, 192**-0.5
RAGGED = (1, 17, 300, 4097, 0)
"""One token: an empty shard on every rank but the first. Zero: empty everywhere."""
STEPS = 20

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

    def show(self, title: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
        """Print rank 0's rows."""
        if self.rank == 0 and as_json:
            typer.echo(json.dumps(rows, indent=2))
        elif self.rank == 0:
            library = "NCCL" if self.is_gpu else "gloo"
            table = Table(title=f"{title}: {self.world} ranks, {library}")
            for name in rows[0]:
                table.add_column(name, justify="right")
            for row in rows:
                table.add_row(*map(str, row.values()))
            Console().print(table)
        dist.destroy_process_group()


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
                replayed = str(capture_and_replay(attend, merger, merged["dcp"]))
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
    rank.show("values", found, as_json=as_json)
    if not all(row["ok"] for row in found):
        raise typer.Exit(1)


def capture_and_replay(
    attend: Callable[[], DecodeOutput], merger: DcpMerger, expected: Tensor
) -> bool:
    """Whether a captured step, collective included, replays to the same bits."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            merger.merge(attend())
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = merger.merge(attend())
    captured.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return torch.equal(captured.out, expected)


def step_seconds(
    rank: Rank, step: Callable[[], object], repeats: int, steps: int
) -> float:
    """Median time of one step, over runs of several steps back to back."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        if not rank.is_gpu:
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            times.append((time.perf_counter() - begin) / steps)
            continue
        torch.cuda.synchronize()
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(steps):
            step()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / steps)
    return statistics.median(times)


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
    steps: Annotated[int, typer.Option(min=1)] = STEPS,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Time a step of the group against one rank that holds everything."""
    rank = Rank()
    found = []
    for name, seq, num, query in product(
        backend or ["auto"], seq_len or (1024, 4096), num_reqs or (1, 4),
        query_len or (1, 4),
    ):  # fmt: skip
        if name == "cuda_flashmla" and query > 1:
            continue
        rows, q = draw(rank, (seq,) * num, query, heads)
        group = rank.dcp(interleave)
        problem, attend = prepare(rank, name, rows, q, query, group, causal=query == 1)
        _, alone = prepare(rank, name, rows, q, query, Dcp(world=1), causal=query == 1)
        merger = DcpMerger(problem, device=rank.info)
        share = heads // rank.world
        mine = slice(rank.rank * share, (rank.rank + 1) * share)
        merged, truth = merger.merge(attend()).out.float(), alone().out[:, mine].float()
        attend_s = step_seconds(rank, attend, repeats, steps)
        step_s = step_seconds(
            rank,
            lambda m=merger, a=attend: m.merge(a()),  # type: ignore[misc]  # bound in this turn
            repeats,
            steps,
        )
        alone_s = step_seconds(rank, alone, repeats, steps)
        found.append(
            {
                "backend": name,
                "S": seq,
                "B": num,
                "Q": query,
                "step_us": round(1e6 * step_s, 1),
                "merge_share": round(1 - attend_s / step_s, 3),
                "one_rank_us": round(1e6 * alone_s, 1),
                "speedup": round(alone_s / step_s, 2),
                "rel_diff": f"{float((merged - truth).norm() / truth.norm()):.1e}",
            }
        )
    rank.show(f"time, interleave {interleave}", found, as_json=as_json)


if __name__ == "__main__":
    app()
