"""Every mutant is caught by a case of the clause that it breaks, never by a crash."""

from dataclasses import replace

import pytest

from mla_decode.builder import GraphSupport
from mla_decode.capability import Capability, Feature, Support
from mla_decode.device import DeviceInfo
from mla_decode.reference import ReferenceBackend
from mla_decode_contract.mutants import MUTANTS
from mla_decode_contract.mutants.mutant import derive, derive_builder
from mla_decode_contract.outcome import FailureKind, Outcome
from mla_decode_contract.pool import Pool
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target

ASSERTIONS = {FailureKind.VALUE, FailureKind.REFUSAL, FailureKind.CONTAINMENT}
ENDS = {
    "abort_instead_of_refusal": ("SIGABRT", "ended by SIGABRT"),
    "exit_instead_of_refusal": (None, "ended itself with status 1"),
}
IN_PROCESS = [mutant for mutant in MUTANTS.values() if mutant.name not in ENDS]


def _with_graphs(backend):
    """The reference, were its builders captured: core keeps the addresses."""
    row = backend.capability.row("cpu")
    features = {**row.features, Feature.GRAPHS: Support.YES}
    builder = derive_builder(backend.builder_cls, graph_support=GraphSupport.ALWAYS)
    return derive(
        backend,
        capability=Capability(rows=(replace(row, features=features),)),
        builder_cls=property(lambda _: builder),
    )


def test_there_are_at_least_forty():
    assert len(MUTANTS) >= 40
    assert all(mutant.purpose.endswith(".") for mutant in MUTANTS.values())


@pytest.mark.parametrize("mutant", IN_PROCESS, ids=lambda mutant: mutant.name)
def test_a_case_of_the_broken_clause_catches_it(mutant, reference):
    right = _with_graphs(reference) if "graphs" in mutant.needs else reference
    wrong = mutant.apply(right)
    target = Target(
        backend="reference", device=DeviceInfo.assume("cpu"), mutant=mutant.name
    )
    failed = []
    for case in (case for case in mutant.cases() if case.profile == "cpu"):
        result = run_case(case.id, wrong, target)
        failed += [result] if result.outcome is Outcome.FAILED else []
        if len(failed) == 2:
            break
    assert failed
    assert {result.failure.kind for result in failed} <= ASSERTIONS


ONLY_BY = {
    "mask_causal_at_one_length": {"mask.non_causal.every_block"},
    "mask_lost_at_one_length": {"mask.causal.every_block"},
    "environment_written_alike": {"ubatch.no_global_state"},
    "empties_of_the_shape": {"empty.others_next_step"},
    "requests_past_8_lost": {"lengths.many_requests"},
    "requests_past_64_lost": {"lengths.many_requests"},
    "address_in_32_bits": {"reads.page_past_2_31"},
    "query_taken_as_packed": {
        "reads.strided_query",
        "reads.query_transposed",
        "reads.query_pair_views",
    },
    "first_scale_kept": {"scale.fp8_per_layer"},
    "last_odd_head_lost": {"heads.around_multiples", "heads.odd"},
    "buffers_renewed": {"stable.growing_builds"},
    "thread_of_the_build": {"ubatch.threads_in_turn"},
    "workspace_undeclared": {"stable.workspace_is_declared"},
    "bits_of_the_batch": {"repeat.batch_invariant"},
    "bits_of_the_block": {"repeat.block_invariant"},
}
"""Faults that every other case of the clause lets through."""


@pytest.mark.parametrize("name", ONLY_BY)
def test_some_faults_show_in_one_place_alone(name, reference):
    mutant = MUTANTS[name]
    right = _with_graphs(reference) if "graphs" in mutant.needs else reference
    target = Target(backend="reference", device=DeviceInfo.assume("cpu"), mutant=name)
    results = [
        run_case(case.id, mutant.apply(right), target)
        for case in mutant.cases()
        if case.profile == "cpu"
    ]
    failed = {r.case for r in results if r.outcome is Outcome.FAILED}
    assert failed
    assert failed <= ONLY_BY[name]


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_a_mutant_passes_for_the_backend_itself(mutant, reference):
    wrong = mutant.apply(reference)
    assert isinstance(wrong, ReferenceBackend)
    assert type(wrong).__qualname__ == "ReferenceBackend"
    assert wrong.name == reference.name
    assert wrong.capability is reference.capability
    assert wrong is not reference
    assert type(reference) is ReferenceBackend


@pytest.mark.parametrize("name", ENDS)
def test_an_end_in_place_of_a_refusal_is_one_failed_case(name):
    target = Target(backend="reference", device=DeviceInfo.assume("cpu"), mutant=name)
    ids = ["refuse.undeclared_features", "refuse.collects_all"]
    with Pool(target=target, workers=1) as pool:
        pool.start(ids)
        ended, other = (pool.result(case_id) for case_id in ids)
    signal, words = ENDS[name]
    assert ended.failure.kind is FailureKind.CONTAINMENT
    assert ended.failure.signal == signal
    assert words in ended.failure.message
    assert other.outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("name", "case", "said"),
    [
        ("mask_ignored", "mask.causal.block_3", "it is the non_causal mask's answer"),
        (
            "mask_always_causal",
            "mask.non_causal.block_3",
            "it is the causal mask's answer",
        ),
        (
            "mask_causal_at_one_length",
            "mask.non_causal.every_block",
            "it is the causal mask's answer",
        ),
        (
            "mask_lost_at_one_length",
            "mask.causal.every_block",
            "it is the non_causal mask's answer",
        ),
        (
            "requests_past_64_lost",
            "lengths.many_requests",
            "a loop or a grid that ends too early",
        ),
        (
            "mask_off_by_one",
            "mask.causal.block_3",
            "one key too few: each row misses the last one that it should see",
        ),
        (
            "last_key_dropped",
            "mask.causal.block_3",
            "one key too few: the request's last key is never read",
        ),
        (
            "mask_one_too_many",
            "mask.causal.block_3",
            "one key too many: each row sees its next sibling",
        ),
        (
            "mask_head_aligned",
            "mask.causal.block_3",
            "a mask aligned to the head: row t sees t + 1 keys",
        ),
        (
            "fp8_scales_ignored",
            "scale.fp8_is_applied",
            "the answer without q_scale and kv_scale",
        ),
        ("mask_rows_reversed", "mask.causal.block_3", None),
        ("lse_log2", "lse.natural_log", "it is the base-2 logarithm"),
        ("lse_negated", "lse.natural_log", None),
    ],
)
def test_a_wrong_value_is_known_again_where_it_is_a_usual_one(name, case, said):
    target = Target(
        backend="reference", device=DeviceInfo.assume("cpu"), mutant=name, seed=0
    )
    failure = run_case(case, MUTANTS[name].apply(ReferenceBackend()), target).failure
    assert failure.kind is FailureKind.VALUE
    if said is None:
        assert "; it is" not in failure.message
    else:
        assert failure.message.endswith(said) or f"{said}:" in failure.message
