"""`mla-decode coverage`: which non-causal blocks a backend serves, and how."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from mla_decode.cli.adapter_options import (
    AssumedLibraries,  # noqa: TC001 - typer reads the annotations
)
from mla_decode.cli.console import console
from mla_decode.device import DeviceInfo, detect_device
from mla_decode.discovery import discover
from mla_decode.errors import ContractError
from mla_decode.lowering.policy import LoweringPolicy
from mla_decode.mask import Mask
from mla_decode.problem import DecodeProblem
from mla_decode.selection import AUTO_ORDER, survey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode.selection import Lowering

HEADS = (8, 12, 16, 24, 32, 48, 64, 96, 128)
QUERY_LENS = tuple(range(2, 17))
DTYPES = (("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"))
OUTCOMES = ("native", "fold", "pad", "split", "refused")
_STYLES = {
    "native": "green",
    "fold": "cyan",
    "pad": "blue",
    "split": "yellow",
    "refused": "red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """How one non-causal block is served."""

    num_heads: int
    query_len: int
    dtype: str
    kv_dtype: str
    outcome: str
    """One of `OUTCOMES`."""
    kv_walks: int | None
    """Of one call; None where the block is refused."""

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        return {name: getattr(self, name) for name in self.__slots__}


def coverage(
    *,
    describe: AssumedLibraries,
    arch: Annotated[
        str | None, typer.Option(help="gfx942, gfx950, sm_90... Default: this one.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Default: the first that auto asks there.")
    ] = None,
    lowering: Annotated[
        LoweringPolicy, typer.Option(help="Allow exact rewrites.")
    ] = LoweringPolicy.REFUSE,
    lse: Annotated[
        bool, typer.Option("--lse", help="The log-sum-exp is needed.")
    ] = False,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 64,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for machines.")
    ] = False,
) -> None:
    """Tabulate the non-causal blocks that one backend serves. Needs no hardware.

    Exit codes: 0 some block is served, 1 none is, 4 usage.
    """
    try:
        device = describe(detect_device() if arch is None else DeviceInfo.assume(arch))
        order = AUTO_ORDER.get(device.arch) or AUTO_ORDER[device.vendor]
        name = backend or order[0]
        found = tuple(
            cells(device, name, lowering.value, needs_lse=lse, page_size=page_size)
        )
    except ContractError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(4) from error
    describe.warn_unasked({name})
    summary = Counter(cell.outcome for cell in found)
    if as_json:
        answer = {
            "backend": name,
            "device": device.as_dict(),
            "lowering": lowering.value,
            "needs_lse": lse,
            "summary": {outcome: summary[outcome] for outcome in OUTCOMES},
            "cells": [cell.as_dict() for cell in found],
        }
        typer.echo(json.dumps(answer, indent=2))
    else:
        _print_tables(device, name, found, summary)
    if summary["refused"] == len(found):
        raise typer.Exit(1)


def cells(
    device: DeviceInfo,
    backend: str,
    lowering: Lowering,
    *,
    needs_lse: bool,
    page_size: int = 64,
) -> Iterator[Cell]:
    """Every cell of the grid HEADS x QUERY_LENS x DTYPES, asked through `survey`."""
    known = discover()
    for dtype, kv_dtype in DTYPES:
        for num_heads in HEADS:
            for query_len in QUERY_LENS:
                problem = DecodeProblem(
                    num_q_heads=num_heads,
                    q_dtype=dtype,
                    kv_dtype=kv_dtype,
                    page_size=page_size,
                    query_lens=frozenset({query_len}),
                    masks=frozenset({Mask.NON_CAUSAL}),
                    needs_lse=needs_lse,
                )
                chosen = survey(
                    problem, device, backend, lowering, candidates=known
                ).selection
                yield Cell(
                    num_heads=num_heads,
                    query_len=query_len,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    outcome="refused" if chosen is None else chosen.plan.kind,
                    kv_walks=None if chosen is None else chosen.plan.cost.kv_walks,
                )


def _print_tables(
    device: DeviceInfo, name: str, found: tuple[Cell, ...], summary: Counter[str]
) -> None:
    out = console()
    by_key = {(c.dtype, c.kv_dtype, c.num_heads, c.query_len): c for c in found}
    for dtype, kv_dtype in DTYPES:
        title = (
            f"{name} on {device.arch}: non-causal, {dtype} query, {kv_dtype} cache; "
            "KV walks a call"
        )
        out.print(Text(title, style="italic"))
        table = Table(pad_edge=False, padding=(0, 0, 0, 1), box=None)
        table.add_column("Q", justify="right", no_wrap=True)
        for num_heads in HEADS:
            table.add_column(f"H{num_heads}", justify="right", no_wrap=True)
        for query_len in QUERY_LENS:
            row = (by_key[dtype, kv_dtype, h, query_len] for h in HEADS)
            table.add_row(str(query_len), *map(_mark, row))
        out.print(table)
    counts = ", ".join(f"{summary[o]} {o}" for o in OUTCOMES)
    out.print(f"{counts}, of {len(found)}")
    out.print(
        "n native, f fold, p pad, s split, - refused; "
        "the one-row-a-token flatten walks the KV Q times"
    )


def _mark(cell: Cell) -> str:
    style = _STYLES[cell.outcome]
    if cell.kv_walks is None:
        return f"[{style}]-[/]"
    return f"[{style}]{cell.outcome[0]}{cell.kv_walks}[/]"
