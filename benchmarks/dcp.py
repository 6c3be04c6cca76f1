"""Time of a decode-context-parallel step against one rank, and the merge's share.

    torchrun --nproc-per-node 2 benchmarks/dcp.py                 # gloo, CPU, reference
    torchrun --nproc-per-node 2 benchmarks/dcp.py --backend triton_mla

Any number of ranks; the collective library follows the device (NCCL on GPUs, gloo on
CPUs). Each rank holds its share of the KV. Rank 0 prints a table; ``--json`` a list.
Every point's merged output is compared with one rank's before it is timed.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import TYPE_CHECKING, Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from mla_decode import (
    CommonAttentionMetadata,
    Dcp,
    DecodeProblem,
    Mask,
    MLADecoder,
    detect_device,
)
from mla_decode.dcp import DcpMerger, local_seq_lens, owned_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mla_decode import DecodeOutput

PAGE, HEADS, SCALE = 64, 128, 192**-0.5


def batch_of(
    lens: int, num_reqs: int, query_len: int, dcp: Dcp, device: torch.device
) -> CommonAttentionMetadata:
    """A uniform batch whose local pages lie back to back."""
    starts = torch.arange(0, (num_reqs + 1) * query_len, query_len, dtype=torch.int32)
    local = local_seq_lens(lens, dcp)
    width = -(-lens // PAGE)
    pages = -(-max(local, 1) // PAGE)
    table = torch.full((num_reqs, width), -1, dtype=torch.int32)
    table[:, :pages] = torch.arange(num_reqs * pages, dtype=torch.int32).view(-1, pages)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.full((num_reqs,), lens, dtype=torch.int32, device=device),
        num_reqs=num_reqs,
        num_actual_tokens=num_reqs * query_len,
        max_query_len=query_len,
        max_seq_len=lens,
        block_table_tensor=table.to(device),
        causal=query_len == 1,
        dcp_local_seq_lens=torch.full(
            (num_reqs,), local, dtype=torch.int32, device=device
        ),
    )


def paged(rows: Tensor) -> Tensor:
    """Rows [num_reqs, tokens, 576] as pages that lie back to back, tails zero."""
    num_reqs, tokens, width = rows.shape
    pages = -(-max(tokens, 1) // PAGE)
    cache = rows.new_zeros(num_reqs, pages * PAGE, width)
    cache[:, :tokens] = rows
    return cache.view(num_reqs * pages, PAGE, width)


def seconds(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of a step, the device drained before and after."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(
    backend: str, seq_len: int, num_reqs: int, query_len: int, dcp: Dcp, repeats: int
) -> dict[str, float | int]:
    """One point: the whole step, the attention alone, and one rank's own step.

    The ranks' merged output is compared with the one rank's, over the same keys.
    """
    info = detect_device(f"cuda:{dcp.rank}" if torch.cuda.is_available() else "cpu")
    device = torch.device(info.torch_device)
    generator = torch.Generator(device).manual_seed(seq_len)
    rows = torch.randn(num_reqs, seq_len, 576, generator=generator, device=device)
    rows = rows.bfloat16()
    q = torch.randn(
        num_reqs * query_len, HEADS, 576, generator=generator, device=device
    ).bfloat16()

    def prepare(group: Dcp) -> tuple[DecodeProblem, Callable[[], DecodeOutput]]:
        problem = DecodeProblem(
            num_q_heads=HEADS,
            page_size=PAGE,
            query_lens=frozenset({query_len}),
            masks=frozenset({Mask.CAUSAL if query_len == 1 else Mask.NON_CAUSAL}),
            dcp=group,
            max_num_reqs=num_reqs,
            max_model_len=seq_len,
        )
        decoder = MLADecoder(problem, backend, device=info)
        cache = paged(rows[:, owned_tokens(seq_len, group).to(device)])
        plan = decoder.plan(batch_of(seq_len, num_reqs, query_len, group, device))
        return problem, lambda: decoder.run(q, cache, plan, softmax_scale=SCALE)

    problem, attend = prepare(dcp)
    _, alone = prepare(Dcp(world=1))
    merger = DcpMerger(problem, device=info)
    merged = merger.merge(attend()).out.float()
    share = HEADS // dcp.world
    truth = alone().out[:, dcp.rank * share : (dcp.rank + 1) * share].float()
    error = float((merged - truth).norm() / truth.norm())
    attend_s = seconds(attend, device, repeats)
    step_s = seconds(lambda: merger.merge(attend()), device, repeats)
    alone_s = seconds(alone, device, repeats)
    return {
        "S": seq_len,
        "B": num_reqs,
        "Q": query_len,
        "ranks": dcp.world,
        "interleave": dcp.interleave,
        "step_us": round(1e6 * step_s, 1),
        "merge_share": round(1 - attend_s / step_s, 3),
        "alone_us": round(1e6 * alone_s, 1),
        "speedup": round(alone_s / step_s, 3),
        "rel_error": round(error, 6),
    }


def main(
    backend: Annotated[str, typer.Option(help="A backend's name, or auto.")] = "auto",
    seq_len: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    num_reqs: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    query_len: Annotated[
        list[int] | None, typer.Option(help="1 is causal, more is non-causal.")
    ] = None,
    interleave: Annotated[int, typer.Option(min=1)] = 1,
    repeats: Annotated[int, typer.Option(min=3)] = 11,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure every point of the grid on the ranks that torchrun started."""
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if is_gpu else "gloo")
    dcp = Dcp(world=dist.get_world_size(), rank=dist.get_rank(), interleave=interleave)
    found = [
        measure(backend, s, n, q, dcp, repeats)
        for s in seq_len or (1024, 4096)
        for n in num_reqs or (1, 4)
        for q in query_len or (1, 4)
    ]
    if dcp.rank == 0 and as_json:
        typer.echo(json.dumps(found, indent=2))
    elif dcp.rank == 0:
        table = Table(title=f"{dcp.world} ranks, {'NCCL' if is_gpu else 'gloo'}")
        for column in found[0]:
            table.add_column(column, justify="right")
        for point in found:
            cells = (
                f"{v:.3g}" if isinstance(v, float) else str(v) for v in point.values()
            )
            table.add_row(*cells)
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
