"""The contract kit: proves an mla-decode adapter on your own hardware.

Importing this package imports neither torch nor pytest.
"""

from mla_decode_contract.catalogue import BY_ID, CASES, Case
from mla_decode_contract.clauses import Clause
from mla_decode_contract.hook import NamesKernels, NamesLibraries, PreparesAssumed
from mla_decode_contract.outcome import (
    CaseResult,
    Failure,
    FailureKind,
    Measurement,
    Outcome,
)

__all__ = [
    "BY_ID",
    "CASES",
    "Case",
    "CaseResult",
    "Clause",
    "Failure",
    "FailureKind",
    "Measurement",
    "NamesKernels",
    "NamesLibraries",
    "Outcome",
    "PreparesAssumed",
]
