"""`mla-decode explain`: who would decode a problem, and who refused and why."""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.tree import Tree

from mla_decode.cli.adapter_options import (
    AssumedLibraries,  # noqa: TC001 - typer reads the annotations
)
from mla_decode.cli.console import console
from mla_decode.device import DeviceInfo, detect_device
from mla_decode.errors import ContractError
from mla_decode.lowering.policy import LoweringPolicy
from mla_decode.mask import Mask
from mla_decode.problem import Dcp, DecodeProblem
from mla_decode.refusal import Refusal, RefusalCode
from mla_decode.selection import Survey, survey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mla_decode.errors import OutdatedLibraryError
    from mla_decode.selection import Selection


DRAFT_BLOCK = 8
"""Tokens of a non-causal block whose length is not given."""


class QueryDtype(str, enum.Enum):
    """Query dtypes that a command line can ask for."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    """By the reference alone."""
    FP8 = "fp8"


def explain(
    *,
    describe: AssumedLibraries,
    arch: Annotated[
        str | None,
        typer.Option(help="gfx942, gfx950, sm_90, cpu... Default: this machine's."),
    ] = None,
    num_heads: Annotated[
        int, typer.Option(min=1, help="Query heads on this rank.")
    ] = 16,
    query_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Query tokens of one request's block. Default: 1; 8 of a draft block.",
        ),
    ] = None,
    non_causal: Annotated[
        bool,
        typer.Option("--non-causal", help="A draft block: tokens see their siblings."),
    ] = False,
    dtype: Annotated[
        QueryDtype, typer.Option(help="The query's; the reference alone has fp32.")
    ] = QueryDtype.BF16,
    kv_dtype: Annotated[
        QueryDtype, typer.Option(help="The cache's, of this layer group.")
    ] = QueryDtype.BF16,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 64,
    lse: Annotated[
        bool, typer.Option("--lse", help="The log-sum-exp is needed.")
    ] = False,
    dcp: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share a request's KV.")
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Steps are captured and replayed.")
    ] = False,
    max_num_reqs: Annotated[
        int, typer.Option(min=1, help="Most requests of a batch.")
    ] = 256,
    max_model_len: Annotated[
        int, typer.Option(min=1, help="Longest request, in tokens.")
    ] = 32768,
    backend: Annotated[
        str | None, typer.Option(help="Ask this backend only. Default: auto.")
    ] = None,
    lowering: Annotated[
        LoweringPolicy, typer.Option(help="Allow exact rewrites.")
    ] = LoweringPolicy.REFUSE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for machines.")
    ] = False,
) -> None:
    """Say who would decode a problem, who refused and why. Needs no hardware.

    Exit codes: 0 somebody accepts, 1 nobody does, 4 usage.
    """
    out_dtype = "bf16" if dtype is QueryDtype.FP8 else dtype.value
    if query_len is None:  # one token sees no siblings: that is no draft block
        query_len = min(DRAFT_BLOCK, max_model_len) if non_causal else 1
    try:
        device = describe(detect_device() if arch is None else DeviceInfo.assume(arch))
        problem = DecodeProblem(
            num_q_heads=num_heads,
            q_dtype=dtype.value,
            kv_dtype=kv_dtype.value,
            out_dtype=out_dtype,
            page_size=page_size,
            query_lens=frozenset({query_len}),
            masks=frozenset({Mask.NON_CAUSAL if non_causal else Mask.CAUSAL}),
            needs_lse=lse,
            dcp=None if dcp is None else Dcp(world=dcp),
            graphs=graphs,
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
        )
        found = survey(problem, device, backend, lowering.value)
    except ContractError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(4) from error
    describe.warn_unasked(found.asked)
    if as_json:
        typer.echo(json.dumps(as_dict(problem, device, found), indent=2))
    else:
        _print_tree(problem, device, found, backend, lowering)
    if found.selection is None:
        raise typer.Exit(1)


def reasons(found: Survey) -> dict[str, tuple[Refusal, ...]]:
    """Every refusal; an outdated library stands as code ``version``."""
    refused = dict(found.refused)
    error = found.outdated
    if error is not None and refused:
        last = next(reversed(refused))
        if all(r.code is not RefusalCode.VERSION for r in refused[last]):
            refused[last] += (outdated_refusal(error),)
    return refused


def outdated_refusal(error: OutdatedLibraryError) -> Refusal:
    """An outdated library as a reason beside others."""
    return Refusal(
        code=RefusalCode.VERSION,
        message=error.message,
        got=error.got,
        allowed=error.allowed,
        fix=error.fix,
    )


def notes(chosen: Selection, device: DeviceInfo) -> list[str]:
    """What the backend says of what it will run, a line each.

    An adapter with several kernels says which of them serves, and why no other, by an
    optional method ``notes(problem, device)``. It is asked of what its builders serve.
    """
    asked: Any = getattr(chosen.backend, "notes", None)
    if asked is None:
        return []
    plan = chosen.plan
    served = dict.fromkeys(block.rewrite.lowered for block in plan.blocks)
    problems = (plan.problem,) if plan.kind == "native" else tuple(served)
    found = (note for problem in problems for note in asked(problem, device))
    return list(dict.fromkeys(found))


def as_dict(
    problem: DecodeProblem, device: DeviceInfo, found: Survey
) -> dict[str, Any]:
    """The answer in the form that `--json` prints."""
    chosen = found.selection
    return {
        "problem": problem.as_dict(),
        "device": device.as_dict(),
        "selected": None
        if chosen is None
        else {
            "backend": chosen.backend.name,
            "evidence": chosen.backend.evidence(device),
            "notes": notes(chosen, device),
            "lowering": chosen.plan.as_dict(),
        },
        "refused": [
            {"backend": name, "refusals": [reason.as_dict() for reason in group]}
            for name, group in reasons(found).items()
        ],
    }


def add_refusals(branch: Tree, group: Iterable[Refusal]) -> None:
    """Hang a backend's reasons into a tree, each with its values and its fix."""
    for reason in group:
        leaf = branch.add(f"[yellow]{reason.code}[/]: {escape(reason.message)}")
        leaf.add(f"got {escape(reason.got)}; allowed: {escape(reason.allowed)}")
        leaf.add(f"[cyan]fix[/]: {escape(reason.fix)}")


def _print_tree(
    problem: DecodeProblem,
    device: DeviceInfo,
    found: Survey,
    backend: str | None,
    lowering: LoweringPolicy,
) -> None:
    assumed = " (assumed)" if device.assumed else ""
    tree = Tree(f"[bold]{problem.summary}[/], on [bold]{device.arch}[/]{assumed}")
    for name, group in reasons(found).items():
        branch = tree.add(f"[red]refused[/] [bold]{escape(name)}[/]")
        add_refusals(branch, group)
    if found.selection is not None:
        _add_selection(tree, device, found.selection, "[green]chosen[/]")
    else:
        tree.add("[red]nobody serves this problem[/]")
        if lowering is LoweringPolicy.REFUSE:
            _add_hint(tree, problem, device, backend)
    console().print(tree)


def _add_selection(
    tree: Tree, device: DeviceInfo, chosen: Selection, word: str
) -> None:
    plan = chosen.plan
    branch = tree.add(
        f"{word} [bold]{chosen.backend.name}[/] ({plan.kind}, "
        f"{plan.cost.kv_walks} KV walk(s) a call)"
    )
    branch.add(f"evidence: {escape(chosen.backend.evidence(device))}")
    for note in notes(chosen, device):
        branch.add(escape(note))
    if plan.pad_rows:
        branch.add(f"{plan.pad_rows} pad row(s) a request")


def _add_hint(
    tree: Tree, problem: DecodeProblem, device: DeviceInfo, backend: str | None
) -> None:
    lowered = survey(problem, device, backend, "exact").selection
    if lowered is not None:
        _add_selection(tree, device, lowered, "[cyan]with --lowering exact[/]:")
