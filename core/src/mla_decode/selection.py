"""Who decodes: ask the device's backends in order, collect every reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mla_decode.discovery import discover
from mla_decode.errors import (
    ArgumentError,
    BackendRefused,
    ContractError,
    OutdatedLibraryError,
)
from mla_decode.lowering import native_plan, nearest_refusals, plan_exact
from mla_decode.refusal import Refusal, RefusalCode
from mla_decode.workspace import Workspace, over_budget, workspace_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from mla_decode.backend import Backend
    from mla_decode.device import DeviceInfo
    from mla_decode.discovery import Candidate
    from mla_decode.lowering import Plan
    from mla_decode.problem import DecodeProblem

Lowering = Literal["refuse", "exact"]

_logger = logging.getLogger("mla_decode")

AUTO_ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("reference",),
    "rocm": ("rocm_aiter", "triton_mla"),
    "cuda": ("triton_mla",),
    "sm_90": ("triton_mla", "cuda_flashmla"),
}
"""Which backends auto asks, by architecture or else vendor. Explicit names may be any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The outcome of a selection that found a backend."""

    backend: Backend
    plan: Plan
    refused: dict[str, tuple[Refusal, ...]]
    """Who was asked before, and every reason of theirs."""
    native_refusals: tuple[Refusal, ...] = ()
    """Why the backend has no kernel for the problem as it stands, where it is lowered."""

    @property
    def workspace(self) -> Workspace:
        """Device memory that a builder of the problem takes; allocates nothing."""
        return workspace_of(self.backend, self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was asked and answered, whether or not somebody accepted."""

    selection: Selection | None
    refused: dict[str, tuple[Refusal, ...]]
    outdated: OutdatedLibraryError | None = None
    """Set where auto stopped at a library that is too old: it never slides past."""

    @property
    def asked(self) -> tuple[str, ...]:
        """Who was asked, in that order: after the first who accepts nobody is."""
        chosen = self.selection
        return (*self.refused, *(() if chosen is None else (chosen.backend.name,)))


def select(
    problem: DecodeProblem,
    device: DeviceInfo,
    backend: str | None = None,
    lowering: Lowering = "refuse",
    *,
    candidates: Mapping[str, Candidate] | None = None,
    workspace_limit_bytes: int | None = None,
) -> Selection:
    """Choose the backend that will serve a problem on a device.

    Args:
        problem: What the layer group asks.
        device: Where it will run.
        backend: A name is honoured or raises; None (or ``"auto"``) walks `AUTO_ORDER`.
        lowering: ``"exact"`` also tries exact rewrites, within each backend after its
            native kernels; ``"refuse"`` never does.
        candidates: What `discover` found; by default it is called.
        workspace_limit_bytes: Device memory that a builder and its calls may take at
            most; a plan that may take more is refused before anything is allocated.

    Raises:
        BackendRefused: Nobody accepts; every reason of every candidate is in it.
        OutdatedLibraryError: The device's own library is too old for a non-causal
            block and a newer release is not: nothing slower is chosen unseen.
        ArgumentError: The name is no backend's, or an option no value of its kind.
    """
    found = survey(
        problem,
        device,
        backend,
        lowering,
        candidates=candidates,
        workspace_limit_bytes=workspace_limit_bytes,
    )
    if found.outdated is not None:
        raise found.outdated
    if found.selection is None:
        raise BackendRefused(
            f"No backend serves {problem.summary} on {device.arch}.",
            found.refused,
        )
    chosen = found.selection
    _logger.log(
        logging.WARNING if chosen.refused else logging.INFO,
        "%s decodes %s on %s (%s); refused: %s",
        chosen.backend.name,
        problem.summary,
        device.arch,
        chosen.plan.kind,
        {name: [str(r.code) for r in rs] for name, rs in chosen.refused.items()},
    )
    return chosen


def survey(
    problem: DecodeProblem,
    device: DeviceInfo,
    backend: str | None = None,
    lowering: Lowering = "refuse",
    *,
    candidates: Mapping[str, Candidate] | None = None,
    workspace_limit_bytes: int | None = None,
) -> Survey:
    """Ask as `select` does, and return every answer instead of raising.

    Raises:
        ArgumentError: The name is no backend's, or the lowering no known word, or the
            limit no number of bytes.
    """
    if not isinstance(lowering, str) or lowering not in {"refuse", "exact"}:
        raise ArgumentError(
            "lowering names no policy.",
            got=repr(lowering),
            allowed='"refuse" or "exact"',
            fix='leave it out, or pass "exact" to allow exact rewrites',
        )
    _require_bytes(workspace_limit_bytes)
    known = discover() if candidates is None else candidates
    refused: dict[str, tuple[Refusal, ...]] = {}
    for name in _order(device, backend, known):
        candidate = known[name]
        if candidate.backend is None:
            refused[name] = (candidate.refusal,) if candidate.refusal else ()
            continue
        asked = candidate.backend
        reasons = ask(asked, problem, device)
        try:
            plan, further = _first_plan(
                asked, problem, device, lowering, reasons, workspace_limit_bytes
            )
        except Exception as error:  # noqa: BLE001 - a cost that raises refuses, as a check does
            plan, further = None, [_checker_error(asked, error)]
        if plan is not None:
            selection = Selection(
                backend=asked,
                plan=plan,
                refused=dict(refused),
                native_refusals=tuple(reasons),
            )
            return Survey(selection=selection, refused=refused)
        reasons += further
        outdated = _outdated(asked, problem, device, reasons)
        refused[name] = tuple(reasons)
        if outdated is not None:
            return Survey(selection=None, refused=refused, outdated=outdated)
    return Survey(selection=None, refused=refused)


def ask(backend: Backend, problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
    """A backend's refusals; a checker that raises is a refusal too."""
    try:
        return list(backend.refusals(problem, device))
    except Exception as error:  # noqa: BLE001 - a broken checker refuses, it does not end the engine
        return [_checker_error(backend, error)]


def _checker_error(backend: Backend, error: Exception) -> Refusal:
    if isinstance(error, ContractError):  # it knows the mend: a setting, most often
        return Refusal(
            code=RefusalCode.CHECKER_ERROR,
            message=error.message.removesuffix("."),
            got=error.got,
            allowed=error.allowed,
            fix=error.fix,
        )
    return Refusal(
        code=RefusalCode.CHECKER_ERROR,
        message="The backend's own check failed",
        got=f"{type(error).__name__}: {error}",
        allowed="a check that returns its answer",
        fix=f"report this to the authors of {backend.name}",
    )


def _first_plan(
    backend: Backend,
    problem: DecodeProblem,
    device: DeviceInfo,
    lowering: Lowering,
    reasons: list[Refusal],
    limit_bytes: int | None,
) -> tuple[Plan | None, list[Refusal]]:
    """The first plan that a backend accepts and a budget admits, or further reasons."""
    gate = _repeats(backend, problem)
    if gate is not None:
        return None, [gate]
    further: list[Refusal] = []
    for plan in _plans(backend, problem, device, lowering, native=not reasons):
        over = None
        if limit_bytes is not None:
            over = over_budget(workspace_of(backend, plan), limit_bytes)
        if over is None:
            return plan, []
        further.append(over)
    if not further and lowering == "exact" and not problem.batch_invariant:
        further = nearest_refusals(problem, backend, device)
    return None, further


def _plans(
    backend: Backend,
    problem: DecodeProblem,
    device: DeviceInfo,
    lowering: Lowering,
    *,
    native: bool,
) -> Iterator[Plan]:
    """The plans of a backend, its cheapest first.

    No rewrite keeps a token's bits from block length to block length: each length may
    become a problem of its own.
    """
    exact = None
    if lowering == "exact" and not problem.batch_invariant:
        exact = plan_exact(problem, backend, device)
    if exact is not None:
        yield exact
    if native and (exact is None or exact.kind != "native"):
        yield native_plan(problem, backend, device)


def _repeats(backend: Backend, problem: DecodeProblem) -> Refusal | None:
    """The refusal of a backend that does not repeat its bits where it must."""
    if backend.deterministic or not problem.deterministic:
        return None
    return Refusal(
        code=RefusalCode.DETERMINISM,
        message="The backend does not give the same bits twice",
        got="deterministic=True",
        allowed="deterministic=False",
        fix="use another backend, or drop deterministic from the problem",
    )


def _require_bytes(limit: Any) -> None:
    if limit is not None and (type(limit) is not int or limit < 0):
        raise ArgumentError(
            "workspace_limit_bytes is no number of bytes.",
            got=repr(limit),
            allowed="None, or an int of 0 or more",
            fix="pass bytes as a Python int",
        )


def _outdated(
    backend: Backend,
    problem: DecodeProblem,
    device: DeviceInfo,
    reasons: list[Refusal],
) -> OutdatedLibraryError | None:
    """The gate of a refused backend; a gate that raises adds a reason."""
    if not problem.needs_non_causal:
        return None
    try:
        backend.supports_non_causal(device)
    except OutdatedLibraryError as error:
        return error
    except Exception as error:  # noqa: BLE001 - as for a check that raises
        reasons.append(_checker_error(backend, error))
    return None


def auto_names(device: DeviceInfo, known: Collection[str]) -> tuple[str, ...]:
    """Who is asked for a device, in this order, where no backend is named."""
    order = AUTO_ORDER.get(device.arch) or AUTO_ORDER[device.vendor]
    in_tree = {name for names in AUTO_ORDER.values() for name in names}
    thirds = sorted(set(known) - in_tree)
    return tuple(name for name in (*order, *thirds) if name in known)


def _order(
    device: DeviceInfo, backend: str | None, known: Mapping[str, Candidate]
) -> tuple[str, ...]:
    if backend is None or backend == "auto":
        return auto_names(device, known)
    if not isinstance(backend, str) or backend not in known:
        raise ArgumentError(
            "No backend has this name.",
            got=repr(backend),
            allowed=", ".join(sorted(known)),
            fix="install the adapter that provides it, or correct the name",
        )
    return (backend,)
