"""A native abort, an exit or a hang is one failed case; the rest run."""

import pytest

from mla_decode.device import DeviceInfo
from mla_decode_contract.child import Child
from mla_decode_contract.outcome import FailureKind, Outcome
from mla_decode_contract.pool import Pool, default_workers
from mla_decode_contract.target import Target

IDS = ["empty.one_request", "empty.all_requests", "empty.block", "lse.natural_log"]

pytestmark = pytest.mark.usefixtures("_importable_backends")


def test_the_start_of_an_interpreter_is_no_hang():
    child = Child(Target(backend="reference", device=DeviceInfo.assume("cpu")))
    assert child.hello()["evidence"] == "reference"
    answer = child.run("backend.import_is_light", 4.0, 0.0)
    child.close()
    assert answer["outcome"] == "passed"


def _run(attribute, *, timeout_s=60.0):
    target = Target(backend=f"misbehaving:{attribute}", device=DeviceInfo.assume("cpu"))
    with Pool(target=target, workers=1, timeout_s=timeout_s) as pool:
        pool.start(IDS)
        return {case_id: pool.result(case_id) for case_id in IDS}, pool.evidence


@pytest.mark.parametrize(
    ("attribute", "signal", "words"),
    [
        ("abort", "SIGABRT", "ended by SIGABRT"),
        ("os_exit", None, "ended itself with status 1"),
        ("leave", None, "called exit(1)"),
        ("hang", "TIMEOUT", "no answer within 8 s"),
    ],
)
def test_one_case_fails_and_the_rest_run(attribute, signal, words):
    results, _ = _run(attribute, timeout_s=8.0 if attribute == "hang" else 60.0)
    failed = results.pop("empty.all_requests")
    assert failed.outcome is Outcome.FAILED
    assert failed.failure.kind is FailureKind.CONTAINMENT
    assert failed.failure.signal == signal
    assert words in failed.failure.message
    assert {result.outcome for result in results.values()} == {Outcome.PASSED}


def test_a_native_fault_leaves_its_traceback():
    results, evidence = _run("abort")
    assert "misbehaving.py" in results["empty.all_requests"].failure.detail
    assert evidence == "hardware"


def test_a_backend_that_cannot_be_prepared_fails_every_case():
    results, evidence = _run("unpreparable")
    assert {result.outcome for result in results.values()} == {Outcome.FAILED}
    messages = {result.failure.message for result in results.values()}
    assert messages == {
        "the backend could not be prepared: RuntimeError: no simulator for cpu today"
    }
    assert evidence == ""


def test_the_hook_gives_the_evidence_word():
    _, evidence = _run("simulated")
    assert evidence == "simulated"


def test_a_closed_pool_says_so_of_what_it_never_ran(target):
    with Pool(target=target, workers=1) as pool:
        pass
    result = pool.result("empty.block")
    assert result.outcome is Outcome.FAILED
    assert "ended before the case" in result.failure.message


def test_no_more_workers_than_six(target):
    assert 1 <= default_workers(target) <= 6
