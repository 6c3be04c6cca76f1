"""The softmax scale: asked for, never guessed, never kept from another call."""

import pytest
from fault_decoding import QUICK, SCALE, WAYS, decoder_of, problem_of, step_of
from hypothesis import given
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
    problem = problem_of(num_q_heads=2)
    decoder = decoder_of("reference", problem)
    alone, many = step_of(problem, [1]), step_of(problem, [40])
    for factor in YARN.values():
        right = SCALE * factor
        alone.check(alone.on(decoder, scale=SCALE), scale=right)  # one key hides it
        many.check(many.on(decoder, scale=right), scale=right)
        with pytest.raises(AssertionError):
            many.check(many.on(decoder, scale=SCALE), scale=right)
    assert SCALE * YARN[1.0] == pytest.approx(0.1352338, rel=1e-5)


@pytest.mark.fault("SCALE-01")
@pytest.mark.parametrize("name", ["scale_of_576", "scale_squared"])
def test_the_kit_looks_for_a_wrong_scale_over_more_than_one_key(name):
    target = Target(backend="reference", device=decoder_of("reference", problem_of()).device)
    wrong = MUTANTS[name].apply(ReferenceBackend())
    cases = [case for case in implementations() if case.startswith("scale.")]
    results = [run_case(case, wrong, target) for case in cases]
    kinds = {r.failure.kind for r in results if r.outcome is Outcome.FAILED}
    assert FailureKind.VALUE in kinds


@pytest.mark.fault("SCALE-03")
@pytest.mark.parametrize("way", WAYS)
def test_no_backend_has_a_default_scale(way):
    problem = problem_of()
    decoder, step = decoder_of(way, problem), step_of(problem, [3])
    plan = decoder.plan(step.common)
    with pytest.raises(TypeError, match="softmax_scale"):
        decoder.run(step.q, step.kv, plan)
    for wrong in (None, True, 0.0, -SCALE, 1, float("nan"), float("inf"), "192"):
        with pytest.raises(ArgumentError, match="192") as caught:
            step.run(decoder, plan, scale=wrong)
        assert "never 576" in caught.value.fix
    step.check(step.run(decoder, plan))  # a refused call spoils nothing


SERVED = {}


def served(way):
    """A decoder and a step of each backend, made once."""
    if way not in SERVED:
        problem = problem_of(needs_lse=True)
        SERVED[way] = decoder_of(way, problem), step_of(problem, [40, 9])
    return SERVED[way]


@pytest.mark.fault("SCALE-04")
@pytest.mark.parametrize("way", QUICK)
@given(scales=st.lists(st.floats(0.02, 0.4), min_size=2, max_size=3))
def test_a_scale_is_each_calls_own(way, scales):
    decoder, step = served(way)
    plan = decoder.plan(step.common)
    for scale in [*scales, scales[0]]:
        step.check(step.run(decoder, plan, scale=scale), scale=scale)
