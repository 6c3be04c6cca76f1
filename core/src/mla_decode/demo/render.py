"""The report for people: text, tables and a small picture of acceptance."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from mla_decode.demo.report import DemoReport, Sample

BAR_CELLS = 28
_EIGHTHS = " ▏▎▍▌▋▊▉"
SAMPLES_SHOWN = 2


def render(report: DemoReport, console: Console) -> None:
    """Print a report; wide and 80-column terminals, colour only where there is one."""
    for sample in report.samples[:SAMPLES_SHOWN]:
        console.print(_sample(sample))
    console.print(_summary(report))
    console.print(_positions(report))
    console.print(_calls(report))


def save_picture(report: DemoReport, path: Path) -> None:
    """Write the printed report as an SVG, the picture of acceptance included."""
    console = Console(record=True, width=88, file=io.StringIO())
    render(report, console)
    console.save_svg(str(path), title="mla-decode demo")


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """Draw a share from 0 to 1 in eighths of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def _sample(sample: Sample) -> Panel:
    text = Text()
    text.append(sample.prompt.rsplit("\n\n", 1)[-1], style="dim")
    if sample.plain == sample.speculative:
        text.append(sample.plain, style="bold green")
        text.append("\n(the same with and without speculation)", style="italic")
    else:
        text.append("\nwithout: ", style="italic")
        text.append(sample.plain, style="bold green")
        text.append("\nwith:    ", style="italic")
        text.append(sample.speculative, style="bold red")
    return Panel(text, title=f"held-out topic {sample.topic!r}", title_align="left")


def _summary(report: DemoReport) -> Table:
    table = Table(
        title=f"{report.num_prompts} held-out prompts, {report.num_tokens} tokens, "
        f"{report.draft_len} drafted a block, {report.device}, {report.dtype}",
        title_justify="left",
        show_header=False,
    )
    table.add_column()
    table.add_column()
    identical = "[green]yes[/]" if report.greedy_identical else "[red]no[/]"
    table.add_row("greedy text identical", identical)
    for parted in report.divergences:
        table.add_row(
            f"  prompt {parted.prompt} parts at token {parted.position}",
            f"the plain choice led by {parted.margin:.2g}",
        )
    table.add_row(
        "tokens per target pass", f"{report.non_causal.tokens_per_target_pass:.2f}"
    )
    table.add_row(
        "accepted draft tokens per block",
        f"[bold]{report.non_causal.per_block:.2f}[/] non-causal, "
        f"{report.causal.per_block:.2f} under a causal mask",
    )
    loopless = report.non_causal_without_repeats
    table.add_row(
        "  in texts that repeat no 4 words",
        f"{loopless.per_block:.2f} ({loopless.num_blocks} of "
        f"{report.non_causal.num_blocks} blocks)",
    )
    repeats = report.repeats
    table.add_row(
        "repeated 4-grams of words",
        f"{repeats.words:.1%} (the topics themselves: {repeats.words_held_out:.1%})",
    )
    table.add_row(
        "repeated 4-grams of tokens",
        f"{repeats.tokens:.1%} (the topics themselves: {repeats.tokens_held_out:.1%})",
    )
    plain, fast = report.plain_s_per_token, report.speculative_s_per_token
    table.add_row(
        f"time per token, {min(report.batch, report.num_prompts)} prompts at a time",
        f"{plain * 1e3:.2f} ms plain, {fast * 1e3:.2f} ms with speculation "
        f"({plain / fast:.2f}x)",
    )
    return table


def _positions(report: DemoReport) -> Table:
    table = Table(
        title="Acceptance by position in the block",
        title_justify="left",
        box=None,
        padding=(0, 1),
    )
    table.add_column("token", justify="right")
    table.add_column("mask")
    table.add_column("share of blocks that accept it", no_wrap=True)
    pairs = zip(report.non_causal.by_position, report.causal.by_position, strict=True)
    for slot, (non_causal, causal) in enumerate(pairs, start=1):
        rows = (
            (str(slot), "non-causal", non_causal, "green"),
            ("", "causal", causal, "yellow"),
        )
        for label, mask, share, style in rows:
            picture = Text(bar(share), style=style)
            picture.append(f" {share:.0%}", style="default")
            table.add_row(label, mask, picture)
    return table


def _calls(report: DemoReport) -> Table:
    table = Table(
        title="Attention calls, counted by the decoder", title_justify="left", box=None
    )
    for name in ("run", "kind", "mask", "Q", "backend", "calls"):
        table.add_column(name, justify="right" if name in {"Q", "calls"} else "left")
    for run, kind in report.call_kinds:
        backend = kind.backend
        if kind.lowering != "native":
            backend += f" ({kind.lowering})"
        table.add_row(
            run, kind.kind, kind.mask, str(kind.query_len), backend, str(kind.count)
        )
    return table
