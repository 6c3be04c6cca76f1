"""Peaks that rise late: whatever scores do from tile to tile, the results are exact."""

import math
from dataclasses import replace

import pytest
import torch
from hopper_batches import KV_SCALE, check, oracle, raise_scores
from hopper_simulated import make_case, simulate
from hopper_simulator import Binder, World

from mla_decode_triton.hopper import asym, lazy_peak

TILE = 64
RISES = {
    "never": [0, -3, 0, -3],
    "by less than the slack": [0, 3, 6, 7],
    "by less each time and by more together": [0, 7, 14, 21],
    "by more": [0, 12, 30, 60],
    "up and down": [20, -40, 29, 0],
}
"""How far, in log2, scores of each of four tiles lie above their usual ones."""


def make_rising_case(plan_kernel, rises, rows, *, fp8=False, dtype=torch.bfloat16):
    """A case where a column of the rope raises the scores of some rows, tile by tile."""
    lens = [TILE * len(rises) - 5, 1]
    case = make_case(
        plan_kernel,
        lens,
        query_len=4,
        num_heads=16,
        page=TILE,
        causal=False,
        num_parts=1,
        dtype=dtype,
        fp8=fp8,
    )
    in_cache = KV_SCALE if fp8 else 1.0
    raise_scores(case.q, case.cache, case.table, rows, rises, in_cache)
    expected = oracle(
        case.q,
        case.cache.double() * in_cache,
        case.table,
        lens,
        4,
        16,
        causal=False,
    )
    return replace(case, expected=expected)


@pytest.mark.parametrize("rise", RISES)
def test_results_are_exact_however_scores_rise(plan_kernel, rise):
    # Rows of one warp, one of another warp, and none of the other two.
    rows = [0, 3, 8, 15, 33]
    dtype = torch.float16 if "more" in rise else torch.bfloat16
    case = make_rising_case(plan_kernel, RISES[rise], rows, dtype=dtype)
    check(simulate(case, "asym"), case.expected)


@pytest.mark.parametrize("rise", ["by less than the slack", "by more"])
def test_fp8_caches_share_it(plan_kernel, rise):
    case = make_rising_case(plan_kernel, RISES[rise], [5, 40], fp8=True)
    check(simulate(case, "asym_fp8"), case.expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 10.0])
def test_any_scale(plan_kernel, scale):
    case = make_case(
        plan_kernel,
        [200, 64],
        query_len=4,
        num_heads=16,
        page=TILE,
        causal=True,
        num_parts=2,
        scale=scale,
        dtype=torch.float16,
    )
    (out, lse), (out_ref, lse_ref) = simulate(case, "asym"), case.expected
    assert (out.double() - out_ref).norm() <= 6e-3 * out_ref.norm()
    # Scores of a thousand have less than 2e-4 of room in float32.
    torch.testing.assert_close(lse.double(), lse_ref, atol=2e-4, rtol=1e-6)


@pytest.mark.parametrize(
    ("scores", "raises"),
    [
        ([0.0, 8.0, -1e4], False),
        ([8.25, 0.0, 7.0], True),
        ([-math.inf, -math.inf, -math.inf], False),
    ],
)
def test_peaks_rise_where_a_weight_would_pass_the_slack(scores, raises):
    world = World((0, 0, 0), (1, 1, 1), 0)
    names = Binder(world, {}).bind(asym)
    names["declare_vote"]()
    raise_heavy = Binder(world, {}).bind(lazy_peak)["raise_heavy"]
    given = torch.full((64, 64), -math.inf)
    given[: len(scores), 0] = torch.tensor(scores)
    before = torch.zeros(64), torch.ones(64, 4), torch.ones(64, 256)
    peak, decay, sums, acc = raise_heavy(given, *before, 1.0, None, None)
    expected = torch.zeros(64)
    if raises:
        expected[: len(scores)] = torch.tensor(scores).clamp(min=0.0)
    assert torch.equal(peak, expected)
    torch.testing.assert_close(decay, torch.exp2(-expected))
    assert (sums == decay[:, None]).all()
    assert (acc == decay[:, None]).all()
