"""The softmax scale: asked for, never guessed, never kept from another call."""

import functools

import pytest
from fault_steps import CPU, SCALE, SERVERS, Step, decoder_of, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import ArgumentError
from mla_decode.reference import ReferenceBackend
from mla_decode_contract.mutants import MUTANTS
from mla_decode_contract.outcome import FailureKind, Outcome
from mla_decode_contract.registry import implementations
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target

YARN = {0.707: 1.589626, 1.0: 1.873854}
"""What a stretch of 40 multiplies the scale by, for two models' mscale_all_dim."""


@pytest.mark.fault("SCALE-01")
def test_a_missing_yarn_factor_shows_from_the_second_key_on():
    problem = problem_of(2)
    decoder = decoder_of(problem, SERVERS["reference"])
    alone, many = Step(problem, CPU, [1]), Step(problem, CPU, [40])
    for factor in YARN.values():
        right = SCALE * factor
        unscaled = alone.run(decoder, softmax_scale=SCALE)
        alone.check(unscaled, softmax_scale=right)  # one key hides it
        many.check(many.run(decoder, softmax_scale=right), softmax_scale=right)
        wrong = many.run(decoder, softmax_scale=SCALE)
        with pytest.raises(AssertionError):
            many.check(wrong, softmax_scale=right)
    assert SCALE * YARN[1.0] == pytest.approx(0.1352338, rel=1e-5)


@pytest.mark.fault("SCALE-01")
@pytest.mark.parametrize("name", ["scale_of_576", "scale_squared"])
def test_the_kit_looks_for_a_wrong_scale_over_more_than_one_key(name):
    wrong = MUTANTS[name].apply(ReferenceBackend())
    target = Target(backend="reference", device=CPU)
    cases = [case for case in implementations() if case.startswith("scale.")]
    results = [run_case(case, wrong, target) for case in cases]
    kinds = {r.failure.kind for r in results if r.outcome is Outcome.FAILED}
    assert FailureKind.VALUE in kinds


@pytest.mark.fault("SCALE-03")
@pytest.mark.parametrize("server", SERVERS)
def test_no_backend_has_a_default_scale(server):
    problem = problem_of()
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(problem, decoder.device, [3])
    plan = decoder.plan(step.common)
    with pytest.raises(TypeError, match="softmax_scale"):
        decoder.run(step.q, step.kv_cache, plan)
    for wrong in (None, True, 0.0, -SCALE, 1, float("nan"), float("inf"), "192"):
        with pytest.raises(ArgumentError, match="192") as caught:
            step.run(decoder, plan, softmax_scale=wrong)
        assert "never 576" in caught.value.fix
    step.check(step.run(decoder, plan))  # a refused call spoils nothing


@functools.cache
def _served(server):
    problem = problem_of(needs_lse=True)
    decoder = decoder_of(problem, SERVERS[server])
    return decoder, Step(problem, decoder.device, [40, 9])


@pytest.mark.fault("SCALE-04")
@pytest.mark.parametrize("server", list(SERVERS)[:3])
@settings(max_examples=15)
@given(scales=st.lists(st.floats(0.02, 0.4), min_size=2, max_size=3))
def test_a_scale_is_each_calls_own(server, scales):
    decoder, step = _served(server)
    plan = decoder.plan(step.common)
    for scale in [*scales, scales[0]]:
        step.check(step.run(decoder, plan, softmax_scale=scale), softmax_scale=scale)
