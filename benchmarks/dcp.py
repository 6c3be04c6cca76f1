"""Decode context parallel on real ranks: values first, then time and the merge's share.

    torchrun --nproc-per-node 2 benchmarks/dcp.py check      # values, empty shards, graph
    torchrun --nproc-per-node 2 benchmarks/dcp.py time       # a step against one rank

Any number of ranks; the collective library follows the device (NCCL on GPUs, gloo on
CPUs). Each rank holds its share of the KV. Rank 0 prints a table, or JSON with the
machine, the date and the versions. On GPUs a step is timed twice: eager, and replayed
from a graph that holds the collective too, which is what engines do.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from dcp_steps import SCALE, Rank, Replay, draw, prepare, step_seconds

from mla_decode import Dcp
from mla_decode.dcp import DcpMerger
from mla_decode.reference.oracle import decode_oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from mla_decode import DecodeOutput, DecodeProblem

RAGGED = (1, 17, 300, 4097, 0)
"""One token: an empty shard on every rank but the first. Zero: empty everywhere."""
app = typer.Typer(add_completion=False, help=__doc__)
Backends = Annotated[list[str] | None, typer.Option(help="Names; default: auto.")]


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
