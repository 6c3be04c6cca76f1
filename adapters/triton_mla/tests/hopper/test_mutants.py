"""One fault at a time: all are found, on whatever schedule, or are none."""

import importlib

import hopper_simulator
import pytest
from hopper_batches import check
from hopper_mutants import mutants
from hopper_simulated import make_case, simulate

LENS = [200, 0, 65, 7]
"""Tiles of one part: enough that every barrier completes a third phase or a second."""

VARIANTS = {
    "asym": ["asym", "asym ahead"],
    "swap": ["swap", "swap_fp8"],
    "swap_fp8": ["swap_fp8"],
    "walk": ["asym", "swap_fp8"],
}
"""Who runs the code of each module."""

AWAITS_ARRIVAL = "bytes may land before they are expected: the arrival is outstanding"
HARMLESS = {
    "mbarrier.expect(q_full, ROWS * 576 * BYTES) swapped with the next": AWAITS_ARRIVAL,
    "mbarrier.expect(left_full.index(stage), TILE * HALF * BYTES) swapped with the "
    "next": AWAITS_ARRIVAL,
    "mbarrier.expect(right_full.index(stage), TILE * HALF * BYTES) swapped with the "
    "next": AWAITS_ARRIVAL,
    "mbarrier.expect(left_full.index(stage), TILE * (HALF + 64) * BYTES) swapped with "
    "the next": AWAITS_ARRIVAL,
    "mbarrier.expect(right_full.index(stage), TILE * (HALF + 64) * BYTES) swapped with "
    "the next": AWAITS_ARRIVAL,
    "mbarrier.expect(raw_full.index(0), TILE * (HALF + 64)) swapped with the "
    "next": AWAITS_ARRIVAL,
    "mbarrier.expect(raw_full.index(1), TILE * HALF) swapped with the "
    "next": AWAITS_ARRIVAL,
    "barrier() swapped with the next": "the decays' store lies in memory of its own",
    "signal(left_free.index(stage)) swapped with the next": "freed a little later",
    "mbarrier.wait(raw_full.index(0), step & 1) swapped with the next": "two waits",
    "mbarrier.arrive(raw_free.index(0), count=1) swapped with the next": "freed later, "
    "and the copies of the other half were issued before",
}
"""Mutants that are no faults, and why."""


@pytest.fixture(scope="module")
def cases(plan_kernel):
    def make(query_len, **options):
        return make_case(
            plan_kernel,
            LENS,
            query_len=query_len,
            num_heads=16,
            page=64,
            causal=query_len > 1,
            num_parts=1,
            **options,
        )

    many = make(4)
    return {
        "asym": many,
        "asym ahead": many,
        "swap": make(1),
        "swap_fp8": make(1, fp8=True),
    }


def complaint(case, variant, **options):
    """How a faulty kernel is found, or None."""
    try:
        check(simulate(case, variant, **options), case.expected)
    except (hopper_simulator.SimulationError, AssertionError) as error:
        return error
    return None


@pytest.mark.parametrize("module", VARIANTS)
def test_every_fault_is_found(module, cases):
    survivors = set()
    kernels = importlib.import_module(f"mla_decode_triton.hopper.{module}")
    for seed, mutant in enumerate(mutants(kernels)):
        found = (
            complaint(cases[variant], variant, seed=seed, trees=mutant.trees)
            for variant in VARIANTS[module]
        )
        if not any(found):
            survivors.add(mutant.name)
    harmless = {name for name in survivors if name.partition(": ")[2] in HARMLESS}
    assert survivors == harmless


def test_no_schedule_hides_a_fault(cases):
    from mla_decode_triton.hopper import swap

    endings = ("(HALF + 64) * BYTES) of fewer bytes", "signal(q_free) removed")
    planted = [m for m in mutants(swap) if m.name.endswith(endings)]
    assert len(planted) == len(endings)
    for mutant in planted:
        for seed in range(16):
            assert complaint(cases["swap"], "swap", seed=seed, trees=mutant.trees)


@pytest.mark.parametrize("variant", ["asym", "asym ahead", "swap", "swap_fp8"])
def test_the_kernels_are_right_on_every_schedule(cases, variant):
    for seed in range(4):
        assert complaint(cases[variant], variant, seed=seed) is None
