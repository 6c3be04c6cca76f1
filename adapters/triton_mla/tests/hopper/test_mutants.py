"""One fault at a time: all are found, on whatever schedule, or are none."""

import importlib

import hopper_simulator
import pytest
from hopper_batches import check
from hopper_mutants import mutants
from hopper_simulated import make_case, simulate

LENS = [200, 0, 65, 7]
"""Tiles of one part: enough that every barrier completes a third phase or a second."""
LENS_OF_FOUR_STAGES = [460, 0, 129, 7]
"""The same, where a tile's place is used again for the fourth tile after it."""

WIDE_SWAP_FP8 = "swap_fp8 with 32 rows"
VARIANTS = {
    "asym": ["asym"],
    "asym_fp8": ["asym_fp8"],
    "scorer": ["asym"],
    "multiplier": ["asym"],
    "named_barriers": ["asym", "asym_fp8"],
    "words": ["asym_fp8"],
    "swap": ["swap", "swap_fp8"],
    "swap_fp8": ["swap_fp8", WIDE_SWAP_FP8],
    "scoring": ["swap_fp8"],
    "copying": ["asym", "swap", "swap_fp8"],
    "storage": ["asym", "swap", "swap_fp8"],
    "rows": ["asym"],
    "walk": ["asym"],
}
"""Who runs the code of each module."""

EARLY_BYTES = "bytes may land before they are expected: the arrival is outstanding"
TWO_STAGES = "what two stages have is given, and taken, in either order"
TWO_HALVES = "and so with two halves"
LAST_MEETING = "to arrive is what closes a meeting, and nothing comes after the last"
HARMLESS = {
    "copying.load_queries: mbarrier.expect(queries.full, ROWS * 576 * BYTES) swapped with the next": EARLY_BYTES,
    "copying.produce: mbarrier.expect(left_full, LEFT) swapped with the next": EARLY_BYTES,
    "copying.produce: mbarrier.expect(right_full, RIGHT) swapped with the next": EARLY_BYTES,
    "scorer._hand_over: barrier() swapped with the next": "decays overwrite nothing "
    "that its own warps read",
    "copying.produce: take_both(LEFT_IS_FREE, NAMED) swapped with the next": TWO_HALVES,
    "words.widen: take_both(LEFT_IS_FREE, WARPGROUP + WARPGROUP) swapped with the next": TWO_HALVES,
    "named_barriers.give_both: give(number, THREADS) swapped with the next": TWO_STAGES,
    "named_barriers.take_both: take(number, THREADS) swapped with the next": TWO_STAGES,
    "named_barriers.take_both: take(number, THREADS) without waiting": LAST_MEETING,
    "named_barriers.take_both: take(number + 1, THREADS) without waiting": LAST_MEETING,
    "scoring._score: signal(added.free.index(step & 1)) swapped with the next": "given "
    "a little later",
    "swap_fp8._multiply: mbarrier.wait(keys.right_full.index(stage), parity) removed": "the "
    "weights say as much; it is the copy engine's own word",
}
"""Changes that are no fault, and why not."""


@pytest.fixture(scope="module")
def cases(plan_kernel):
    def make(query_len, lens=LENS, **options):
        return make_case(
            plan_kernel,
            lens,
            query_len=query_len,
            num_heads=16,
            page=64,
            causal=query_len > 1,
            num_parts=1,
            **options,
        )

    many, many_fp8 = make(4), make(4, fp8=True)
    return {
        "asym": many,
        "asym_fp8": many_fp8,
        "swap": make(1),
        "swap_fp8": make(1, LENS_OF_FOUR_STAGES, fp8=True),
        WIDE_SWAP_FP8: make(2, LENS_OF_FOUR_STAGES, fp8=True),
    }


def complaint(case, variant, **options):
    """How a faulty kernel is found, or None."""
    try:
        check(simulate(case, variant.split()[0], **options), case.expected)
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
    mine = {name for name in HARMLESS if name.startswith(f"{module}.")}
    assert survivors == mine


def test_no_schedule_hides_a_fault(cases):
    from mla_decode_triton.hopper import copying, swap

    endings = ("expect(left_full, LEFT) of fewer bytes", "signal(queries.free) removed")
    made = [*mutants(copying), *mutants(swap)]
    planted = [mutant for mutant in made if mutant.name.endswith(endings)]
    assert len(planted) == len(endings)
    for mutant in planted:
        for seed in range(16):
            assert complaint(cases["swap"], "swap", seed=seed, trees=mutant.trees)


@pytest.mark.parametrize(
    "variant",
    ["asym", "asym_fp8", "swap", "swap_fp8", WIDE_SWAP_FP8],
)
def test_the_kernels_are_right_on_every_schedule(cases, variant):
    for seed in range(4):
        assert complaint(cases[variant], variant, seed=seed) is None
