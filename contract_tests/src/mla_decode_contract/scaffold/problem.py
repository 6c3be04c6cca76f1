"""The error of who asks for a scaffold that cannot be made."""

from __future__ import annotations

from mla_decode_contract.target import UsageProblem


class ScaffoldProblem(UsageProblem):
    """Nothing was written.

    Attributes:
        got: What was asked.
        allowed: What can be made.
        fix: What to do.
    """

    def __init__(self, message: str, *, got: str, allowed: str, fix: str) -> None:
        super().__init__(f"{message} (got: {got}; allowed: {allowed}). {fix}")
        self.got, self.allowed, self.fix = got, allowed, fix
