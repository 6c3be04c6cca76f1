"""Demanding a typed error: the right class, its data, and no damage before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_decode.errors import BackendRefused, ContractError, OutdatedLibraryError
from mla_decode.problem import ROW_WIDTH
from mla_decode.selection import select
from mla_decode_contract.call import check, decode
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.target import as_candidates
from mla_decode_contract.violations import (
    ContractViolation,
    RefusalViolation,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mla_decode.problem import DecodeProblem
    from mla_decode_contract.context import CaseContext

LARGEST_CALL_BYTES = 256 << 20
"""A refused problem is called only where its tensors are smaller than this."""


def demand_error(
    expected: type[Exception] | tuple[type[Exception], ...],
    what: str,
    call: Callable[[], Any],
) -> Exception:
    """Demand that a call raises one of the contract's errors, with its data.

    Args:
        expected: The error class, or classes, of the clause.
        what: The input, in words for the message.
        call: Makes the call.

    Raises:
        RefusalViolation: Nothing was raised, or another class.
    """
    try:
        value = call()
    except expected as error:
        if isinstance(error, ContractError):
            require_data(error)
        return error
    except Exception as error:
        raise RefusalViolation(
            f"{what}: expected {_names(expected)}, got {type(error).__name__}: {error}"
        ) from error
    raise RefusalViolation(
        f"{what}: expected {_names(expected)}, but it was served "
        f"({type(value).__name__})"
    )


def require_data(error: ContractError) -> None:
    """Demand that an error says what was asked, what is allowed, and what to do."""
    for name in ("got", "allowed", "fix"):
        require(
            bool(str(getattr(error, name, "")).strip()),
            f"{type(error).__name__} carries no {name!r}: {error}",
        )


def demand_refusal(
    ctx: CaseContext, problem: DecodeProblem, codes: Iterable[str]
) -> list[dict[str, str]]:
    """Demand the typed refusal of a problem, then call the backend with it anyway.

    Args:
        ctx: Whose backend is asked.
        problem: Outside the declared capability.
        codes: One of these must be among the reasons' codes.

    Returns:
        The reasons as plain data.

    Raises:
        RefusalViolation: It was served, or refused in another way.
    """
    due = frozenset(codes)
    reasons = ctx.refusals(problem)
    given = {str(reason.code) for reason in reasons}
    require_code(given, due, "refusals()")
    for reason in reasons:
        for name in ("message", "got", "allowed", "fix"):
            require(bool(str(getattr(reason, name))), f"a refusal has no {name!r}")
    try:
        select(
            problem,
            ctx.device,
            ctx.backend.name,
            candidates=as_candidates(ctx.backend),
        )
    except BackendRefused as error:
        require_code(error.codes, due, "select()")
    except OutdatedLibraryError as error:
        require_data(error)
    else:
        raise RefusalViolation("select() accepted what refusals() refuses")
    _call_anyway(ctx, problem, due | given)
    return [reason.as_dict() for reason in reasons]


def require_code(given: Iterable[str], due: frozenset[str], who: str) -> None:
    """Demand that one of the due codes was given."""
    if not due & set(given):
        raise RefusalViolation(
            f"{who} gave codes [{', '.join(sorted(given))}]; "
            f"the clause demands one of [{', '.join(sorted(due))}]"
        )


def _call_anyway(ctx: CaseContext, problem: DecodeProblem, due: frozenset[str]) -> None:
    query_len = problem.max_query_len
    seq_len = max(10, query_len)
    page_bytes = problem.page_stride * 4
    row_bytes = query_len * problem.num_q_heads * ROW_WIDTH * 4
    pages = -(-seq_len // problem.page_size) + 3
    if page_bytes * pages + row_bytes > LARGEST_CALL_BYTES:
        ctx.notes.append("not called: the problem's tensors are too large")
        return
    if seq_len > problem.max_model_len or problem.max_num_reqs > 1 << 20:
        ctx.notes.append("not called: no batch of the problem is small enough")
        return
    causal = "causal" in {mask.value for mask in problem.masks}
    scene = draw_scene(
        ctx,
        problem,
        [seq_len],
        causal=causal,
        global_lens=[seq_len * 2] if problem.dcp is not None else None,
    )
    try:
        builder = ctx.backend.builder_cls(problem, ctx.device)
        if problem.graphs:
            builder.build_for_capture(scene.common)
        result = decode(scene, builder)
    except BackendRefused as error:
        require_code(error.codes, due, "the builder")
        return
    except OutdatedLibraryError:
        return
    except Exception as error:
        raise RefusalViolation(
            "called with a problem that it refuses, the backend raised "
            f"{type(error).__name__} instead of BackendRefused: {error}"
        ) from error
    try:
        check(scene, result)
    except ContractViolation as violation:
        raise RefusalViolation(
            "called with a problem that it refuses, the backend quietly served "
            f"something else: {violation.message}"
        ) from violation
    raise RefusalViolation(
        "works though declared unsupported: the declaration is too narrow, or the "
        "builder does not refuse what refusals() refuses"
    )


def _names(expected: type[Exception] | tuple[type[Exception], ...]) -> str:
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return " or ".join(kind.__name__ for kind in kinds)
