"""`mla-decode demo`: the demo on the command line."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from mla_decode.lowering.policy import LoweringPolicy


def demo(
    *,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 32,
    tokens: Annotated[
        int, typer.Option(min=1, help="New tokens of each prompt, at most 313.")
    ] = 96,
    draft_len: Annotated[
        int, typer.Option(min=1, max=6, help="Drafted tokens that a block verifies.")
    ] = 6,
    batch: Annotated[
        int, typer.Option(min=1, help="Prompts that generate at the same time.")
    ] = 2,
    backend: Annotated[
        str, typer.Option(help="Who attends; auto asks in the documented order.")
    ] = "auto",
    lowering: Annotated[
        LoweringPolicy, typer.Option(help="Allow exact rewrites.")
    ] = LoweringPolicy.REFUSE,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda:0... Default: the first accelerator, or the CPU."),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            min=1, help="CPU threads; the model is too small to gain by more."
        ),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for machines.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write the report, its picture too, as an SVG here."),
    ] = None,
) -> None:
    """Generate text by speculative decoding, every attention call through the contract.

    A small MLA model continues held-out topics of Python's documentation, token by
    token and by draft blocks, and the two must agree.

    Exit codes: 0 identical text, 1 refused or texts differ, 4 usage.
    """
    import torch  # noqa: PLC0415 - the command line starts without torch
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.progress import Progress  # noqa: PLC0415 - as above

    from mla_decode.cli.picture import require_place  # noqa: PLC0415 - as above
    from mla_decode.demo.render import (  # noqa: PLC0415 - as above
        render,
        save_picture,
    )
    from mla_decode.demo.run import DemoOptions, run_demo  # noqa: PLC0415 - as above
    from mla_decode.errors import (  # noqa: PLC0415 - as above
        ArgumentError,
        ContractError,
    )

    torch.set_num_threads(threads)
    options = DemoOptions(
        prompts=prompts,
        tokens=tokens,
        draft_len=draft_len,
        batch=batch,
        backend=backend,
        lowering=lowering.value,
        device=device,
    )
    aside = Console(stderr=True)
    try:
        if plot is not None:
            require_place(plot)
        with Progress(
            console=aside, transient=True, disable=not aside.is_terminal
        ) as p:
            task = p.add_task("generating", total=1.0)
            report = run_demo(
                options, progress=lambda done: p.update(task, completed=done)
            )
    except ContractError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(4 if isinstance(error, ArgumentError) else 1) from error
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        render(report, Console())
    if plot is not None:
        save_picture(report, plot)
    if not report.greedy_identical:
        raise typer.Exit(1)
