"""`mla-decode bench`: options in, points timed, a table, JSON or a picture out."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from mla_decode.cli.bench.measure import copy_bandwidth, measure
from mla_decode.cli.bench.plan import (
    backends_of,
    default_grid,
    grid_points,
    trace_points,
)
from mla_decode.cli.bench.plot import draw, formats, load_figure
from mla_decode.cli.bench.points import Layout
from mla_decode.cli.bench.table import print_table, progress
from mla_decode.cli.bench.trace import Columns, read_trace, replay
from mla_decode.cli.explain import QueryDtype
from mla_decode.cli.picture import require_place
from mla_decode.device import detect_device
from mla_decode.discovery import discover
from mla_decode.errors import ArgumentError, ContractError
from mla_decode.lowering.policy import LoweringPolicy

if TYPE_CHECKING:
    from mla_decode.cli.bench.points import Point

_Ints = list[int]


def bench(
    *,
    num_heads: Annotated[
        _Ints | None, typer.Option(min=1, help="Query heads; repeatable.")
    ] = None,
    query_len: Annotated[
        _Ints | None, typer.Option(min=1, help="Tokens of a block; repeatable.")
    ] = None,
    batch: Annotated[_Ints | None, typer.Option(min=1, help="Repeatable.")] = None,
    seq_len: Annotated[
        _Ints | None, typer.Option(min=1, help="Keys of a request; repeatable.")
    ] = None,
    non_causal: Annotated[
        bool, typer.Option("--non-causal", help="Draft blocks, or draft steps too.")
    ] = False,
    dtype: Annotated[QueryDtype, typer.Option(help="The query's.")] = QueryDtype.BF16,
    kv_dtype: Annotated[
        QueryDtype, typer.Option(help="The cache's.")
    ] = QueryDtype.BF16,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 64,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable; simulated ones run only when named."),
    ] = None,
    lowering: Annotated[
        LoweringPolicy, typer.Option(help="Allow exact rewrites.")
    ] = LoweringPolicy.REFUSE,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda:0... Default: the accelerator.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each point.")] = 7,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this CSV of requests instead.")
    ] = None,
    trace_columns: Annotated[
        str, typer.Option(help="Its header names: time, context, generated.")
    ] = "TIMESTAMP,ContextTokens,GeneratedTokens",
    trace_steps: Annotated[
        int, typer.Option(min=1, help="Steps to time, evenly over the replay.")
    ] = 8,
    step_ms: Annotated[
        float, typer.Option(min=0.001, help="A step's length on the trace's clock.")
    ] = 30.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw FILE.png (mla-decode[plot]).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for machines.")
    ] = False,
) -> None:
    """Time the installed backends of this machine side by side.

    The last column is the same backend's time over one row a token, divided by the
    block's. With --trace, requests come and go as in the file, up to the largest
    --batch at a time. Exit codes: 0 timed, 1 everything was refused, 4 usage.
    """
    try:
        figure_cls = None
        if plot is not None:
            figure_cls = load_figure()
            require_place(plot, formats())
        found = detect_device(device)
        candidates = discover()
        names = backends_of(found, candidates, backend or [])
        grid = default_grid(found, num_heads, query_len, batch, seq_len)
        layout = Layout(dtype=dtype.value, kv_dtype=kv_dtype.value, page_size=page_size)
        points: list[Point]
        if trace is None:
            points = grid_points(grid, layout, causal=not non_causal)
        else:
            block = max(grid.query_lens)
            steps = replay(
                read_trace(trace, _columns(trace_columns)),
                max_batch=max(grid.batches),
                query_len=block,
                accepted=(1 + block) / 2,
                step_s=step_ms / 1e3,
            )
            points = trace_points(
                steps, grid, layout, count=trace_steps, non_causal=non_causal
            )
        rows = [
            measure(
                point,
                name,
                found,
                candidates=candidates,
                lowering=lowering.value,
                repeats=repeats,
            )
            for point, name in progress([(p, n) for p in points for n in names])
        ]
    except ContractError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(4) from error
    bandwidth = copy_bandwidth(found)
    date = datetime.now(timezone.utc).date().isoformat()
    evidence = ", ".join(dict.fromkeys(f"{r.backend}: {r.evidence}" for r in rows))
    title = f"{found.name or found.arch}, {date}; {evidence}"
    if as_json:
        answer = {
            "device": found.as_dict(),
            "date": date,
            "copy_gb_s": bandwidth,
            "rows": [row.as_dict() for row in rows],
        }
        typer.echo(json.dumps(answer, indent=2))
    else:
        print_table(rows, title=title, bandwidth=bandwidth)
    if plot is not None:
        draw(figure_cls, rows, plot, title=title, bandwidth=bandwidth)
    if all(row.us is None for row in rows):
        raise typer.Exit(1)


def _columns(text: str) -> Columns:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 3:
        raise ArgumentError(
            "--trace-columns names three columns.",
            got=repr(text),
            allowed="time,context,generated",
            fix="separate the three header names by commas",
        )
    return Columns(timestamp=names[0], context=names[1], generated=names[2])
