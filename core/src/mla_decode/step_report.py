"""What served a step: the kernel, what was padded, cut and rewritten, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mla_decode.backend import Backend
    from mla_decode.device import DeviceInfo
    from mla_decode.metadata import DecodeMetadata, StepFacts
    from mla_decode.refusal import Refusal
    from mla_decode.selection import Selection
    from mla_decode.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Downgrade:
    """Something else than what was to be had first, and why."""

    wanted: str
    taken: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.taken} instead of {self.wanted}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What served the last planned step."""

    backend: str
    evidence: str
    """What of it ran where, in a word or two."""
    kernels: tuple[str, ...]
    """Device kernels of one forward; empty where the backend names none."""
    path: str
    """Which of its ways the library takes; empty where it has one."""
    mask: str
    num_reqs: int
    query_len: int
    """0 where the batch was ragged."""
    num_q_heads: int
    kernel_query_len: int
    """Tokens of a block as the kernel gets it, folded or padded."""
    kernel_num_q_heads: int
    """Heads as the kernel gets them, folded or padded."""
    max_splits: int | None
    """Most pieces that a request's keys are cut into; None where the backend does not
    say."""
    deterministic: bool
    """Whether the same call twice gives the same bits."""
    batch_invariant: bool
    """Whether the problem asked that a token's bits hang on no neighbour, and got it."""
    lowering: dict[str, Any]
    """The plan: its kind, its cost, its pad rows."""
    workspace: Workspace
    """Device memory of the decoder's builder, known before it was allocated."""
    downgrades: tuple[Downgrade, ...]
    """Earlier choices that refused, rewrites, and the backend's own ways round."""
    refused: dict[str, tuple[str, ...]]
    """Codes of those who were asked first; `downgrades` has their reasons."""

    @property
    def workspace_bytes(self) -> int:
        """The workspace's total."""
        return self.workspace.total

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        return {**asdict(self), "workspace": self.workspace.as_dict()}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def report_step(
    metadata: DecodeMetadata,
    selection: Selection,
    backend: Backend,
    device: DeviceInfo,
) -> StepReport:
    """Put together what is known of a step; reads no tensor.

    Args:
        metadata: What the step was planned as.
        selection: Who was chosen, and who refused before.
        backend: The chosen one, with its lowering applied.
        device: Where it runs.
    """
    facts, problem = metadata.facts(), selection.plan.problem
    return StepReport(
        backend=backend.name,
        evidence=backend.evidence(device),
        kernels=facts.kernels,
        path=facts.path,
        mask=metadata.mask.value,
        num_reqs=metadata.num_reqs,
        query_len=metadata.query_len,
        num_q_heads=problem.num_q_heads,
        kernel_query_len=facts.query_len,
        kernel_num_q_heads=facts.num_q_heads,
        max_splits=facts.max_splits,
        deterministic=backend.deterministic,
        batch_invariant=problem.batch_invariant,
        lowering=selection.plan.as_dict(),
        workspace=selection.workspace,
        downgrades=tuple(_downgrades(selection, facts)),
        refused={
            name: tuple(str(reason.code) for reason in reasons)
            for name, reasons in selection.refused.items()
        },
    )


def _downgrades(selection: Selection, facts: StepFacts) -> Iterator[Downgrade]:
    name = selection.backend.name
    for other, reasons in selection.refused.items():
        yield Downgrade(wanted=other, taken=name, reasons=_words(reasons))
    if selection.native_refusals:
        yield Downgrade(
            wanted=f"{name}'s kernels as they stand",
            taken=f"an exact {selection.plan.kind}",
            reasons=_words(selection.native_refusals),
        )
    for reason in facts.downgrades:
        yield Downgrade(wanted="its usual path", taken=facts.path, reasons=(reason,))


def _words(reasons: Iterable[Refusal]) -> tuple[str, ...]:
    return tuple(str(reason) for reason in reasons)


def _lines(report: StepReport) -> Iterator[str]:
    """The report for people, a subject a line."""
    block = f"Q={report.query_len}" if report.query_len else "ragged blocks"
    yield f"{report.backend} ({report.evidence})"
    yield f"  step       {report.num_reqs} requests, {block}, {report.mask}"
    yield f"  kernel     {_kernel(report)}"
    if report.max_splits is not None:
        yield f"  splits     {report.max_splits} at most"
    lowering: Mapping[str, Any] = report.lowering
    yield (
        f"  lowering   {lowering['kind']}, {lowering['kv_walks']} walks over the keys, "
        f"{lowering['pad_rows']} pad rows"
    )
    bits = "the same bits twice" if report.deterministic else "bits may differ"
    if report.batch_invariant:
        bits = "the same bits whatever the batch"
    yield f"  bits       {bits}"
    yield f"  workspace  {report.workspace.total} bytes"
    rest: Sequence[Downgrade] = report.downgrades
    yield from (f"  downgrade  {downgrade}" for downgrade in rest)


def _kernel(report: StepReport) -> str:
    names = " + ".join(report.kernels) or "not named"
    shape = f"{report.kernel_num_q_heads} heads"
    if report.kernel_query_len:
        shape += f" x {report.kernel_query_len} tokens"
    path = f", {report.path}" if report.path else ""
    return f"{names} ({shape}{path})"
