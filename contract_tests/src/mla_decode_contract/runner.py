"""Runs one case in this process and says honestly how it ended."""

from __future__ import annotations

import time
import traceback
import unittest
from typing import TYPE_CHECKING

import pytest

from mla_decode_contract.context import DEFAULT_BUDGET_UNITS, CaseContext
from mla_decode_contract.demand import demand_refusal
from mla_decode_contract.global_state import first_state
from mla_decode_contract.outcome import CaseResult, Failure, FailureKind, Outcome
from mla_decode_contract.registry import implementations
from mla_decode_contract.violations import ContractViolation, DeclaredUnsupported

if TYPE_CHECKING:
    from mla_decode.backend import Backend
    from mla_decode_contract.target import Target

_SKIPS = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
_LONGEST_DETAIL = 6000


def run_case(
    case_id: str,
    backend: Backend,
    target: Target,
    *,
    budget_units: float = DEFAULT_BUDGET_UNITS,
) -> CaseResult:
    """Run one case against a backend, in this process.

    A native abort or a hang of the backend is one of this process: `pool` contains
    them in workers.

    Args:
        case_id: An id of the catalogue.
        backend: Prepared already.
        target: The device and seed.
        budget_units: Most units of error.
    """
    function = implementations()[case_id]
    first_state()
    ctx = CaseContext(
        case_id=case_id,
        backend=backend,
        backend_spec=target.backend,
        device=target.device,
        seed=target.seed,
        budget_units=budget_units,
    )
    begin = time.perf_counter()
    refusals: list[dict[str, str]] = []
    failure: Failure | None = None
    try:
        try:
            function(ctx)
        except DeclaredUnsupported as unsupported:
            refusals = demand_refusal(ctx, unsupported.problem, unsupported.codes)
    except ContractViolation as violation:
        failure = _failure(violation.kind, violation.message)
    except _SKIPS as skipped:
        failure = _failure(FailureKind.SKIP, f"skipped from inside the case: {skipped}")
    except SystemExit as left:
        failure = _failure(
            FailureKind.CONTAINMENT, f"the backend called exit({left.code!r})"
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this case's failure
        failure = _failure(FailureKind.CRASH, f"{type(error).__name__}: {error}")
    if failure is not None:
        outcome = Outcome.FAILED
    else:
        outcome = Outcome.REFUSED if refusals else Outcome.PASSED
    return CaseResult(
        case=case_id,
        outcome=outcome,
        duration_s=round(time.perf_counter() - begin, 4),
        failure=failure,
        refusals=tuple(refusals),
        measurements=tuple(ctx.measurements),
        problems=tuple(ctx.problems[:4]),
        notes=tuple(ctx.notes),
        kernels=tuple(ctx.kernels),
    )


def _failure(kind: FailureKind, message: str) -> Failure:
    detail = traceback.format_exc()[-_LONGEST_DETAIL:]
    return Failure(kind=kind, message=message, detail=detail)
