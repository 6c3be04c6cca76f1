"""The table of a run, and the bar that says how long it will take."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from mla_decode.cli.console import console
from mla_decode.cli.explain import add_refusals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mla_decode.cli.bench.points import Row

_T = TypeVar("_T")


def progress(things: Sequence[_T]) -> Iterator[_T]:
    """Go through things under a bar with the time left; on a terminal's stderr only."""
    aside = Console(stderr=True)
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=aside,
        transient=True,
        disable=not aside.is_terminal,
    ) as bar:
        yield from bar.track(things)


def print_table(rows: Sequence[Row], *, title: str, bandwidth: float) -> None:
    """Print medians, KV GB/s and the ratio to the flatten, and every reason below."""
    out = console()
    out.print(Text(title, style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("backend", no_wrap=True)
    table.add_column("step", no_wrap=True)
    for name in ("H", "Q", "B", "seq_len", "us", "KV GB/s", "x flatten"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        point = row.point
        mask = "causal" if point.causal else "non-causal"
        step = mask if point.origin == "grid" else point.origin
        sizes = (point.num_heads, point.query_len, point.batch, point.mean_seq_len)
        table.add_row(row.backend, step, *map(str, sizes), *_figures(row))
    out.print(table)
    out.print(
        Text(
            "us: median of a call; KV GB/s: each key once "
            f"(a copy moves {bandwidth:.0f} here); x flatten: time of one row a token "
            "over the block's"
        )
    )
    refused = [row for row in rows if row.refusals]
    for name in dict.fromkeys(row.backend for row in refused):
        reasons = (row.refusals for row in refused if row.backend == name)
        tree = Tree(f"[red]refused[/] [bold]{escape(name)}[/]")
        add_refusals(tree, dict.fromkeys(chain.from_iterable(reasons)))
        out.print(tree)


def _figures(row: Row) -> tuple[str | Text, str, str]:
    if row.us is None or row.kv_gb_s is None:
        return Text("refused", style="red"), ",".join(row.refused), ""
    gain = "-" if row.speed_up is None else f"{row.speed_up:.2f}"
    return f"{row.us:.1f}", f"{row.kv_gb_s:.1f}", gain
