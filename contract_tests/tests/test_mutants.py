"""Every mutant is caught by a case of the clause that it breaks, never by a crash."""

import pytest

from mla_decode.device import DeviceInfo
from mla_decode.reference import ReferenceBackend
from mla_decode_contract.mutants import MUTANTS
from mla_decode_contract.outcome import FailureKind, Outcome
from mla_decode_contract.pool import Pool
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target

ASSERTIONS = {FailureKind.VALUE, FailureKind.REFUSAL, FailureKind.CONTAINMENT}
IN_PROCESS = [m for m in MUTANTS.values() if m.name != "abort_instead_of_refusal"]


def test_there_are_at_least_ten():
    assert len(MUTANTS) >= 10
    assert all(mutant.purpose.endswith(".") for mutant in MUTANTS.values())


@pytest.mark.parametrize("mutant", IN_PROCESS, ids=lambda mutant: mutant.name)
def test_a_case_of_the_broken_clause_catches_it(mutant, reference):
    wrong = mutant.apply(reference)
    target = Target(
        backend="reference", device=DeviceInfo.assume("cpu"), mutant=mutant.name
    )
    cases = [case for case in mutant.cases() if case.profile == "cpu"]
    results = [run_case(case.id, wrong, target) for case in cases]
    kinds = {r.failure.kind for r in results if r.outcome is Outcome.FAILED}
    assert kinds
    assert kinds <= ASSERTIONS


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_a_mutant_passes_for_the_backend_itself(mutant, reference):
    wrong = mutant.apply(reference)
    assert isinstance(wrong, ReferenceBackend)
    assert type(wrong).__qualname__ == "ReferenceBackend"
    assert wrong.name == reference.name
    assert wrong.capability is reference.capability
    assert type(reference) is ReferenceBackend


def test_an_abort_in_place_of_a_refusal_is_one_failed_case():
    target = Target(
        backend="reference",
        device=DeviceInfo.assume("cpu"),
        mutant="abort_instead_of_refusal",
    )
    ids = ["refuse.undeclared_features", "refuse.collects_all"]
    with Pool(target=target, workers=1) as pool:
        pool.start(ids)
        aborted, other = (pool.result(case_id) for case_id in ids)
    assert aborted.failure.kind is FailureKind.CONTAINMENT
    assert aborted.failure.signal == "SIGABRT"
    assert "abort_instead_of_refusal" not in aborted.failure.message
    assert other.outcome is Outcome.PASSED
