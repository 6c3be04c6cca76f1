"""How a case says that a clause is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode_contract.outcome import FailureKind

if TYPE_CHECKING:
    from mla_decode.problem import DecodeProblem


class ContractViolation(Exception):  # noqa: N818 - it is the backend's error, not the kit's
    """The backend broke the clause that the case checks.

    Attributes:
        kind: Which kind of assertion found it.
        message: What was demanded and what came.
    """

    kind = FailureKind.VALUE

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ValueViolation(ContractViolation):
    """A number, buffer or property is not what the clause demands."""

    kind = FailureKind.VALUE


class RefusalViolation(ContractViolation):
    """A typed error is missing, of another type, or came where none is due."""

    kind = FailureKind.REFUSAL


class DeclaredUnsupported(Exception):  # noqa: N818 - a turn of the case, not an error
    """No problem inside the declared capability exercises the case.

    The runner then demands the typed refusal instead.

    Attributes:
        problem: Inside the capability but for what the case needs.
        codes: A refusal with one of these codes is due.
    """

    def __init__(self, problem: DecodeProblem, codes: frozenset[str]) -> None:
        super().__init__(f"declared unsupported: {problem.as_dict()}")
        self.problem = problem
        self.codes = codes


def require(condition: bool, message: str) -> None:
    """Demand a property of the backend.

    Raises:
        ValueViolation: It does not hold.
    """
    if not condition:
        raise ValueViolation(message)
