"""Every variant of the kernel, its own source executed by the simulator."""

import pytest
import torch
from hopper_batches import LENS, check
from hopper_simulated import interpreted_merge, make_case, simulate


def query_dtype(variant):
    """fp8's NaN is a finite bf16, and so poisons an fp16 query's cache alone."""
    return torch.bfloat16 if variant == "swap_fp8" else torch.float16


@pytest.mark.parametrize(
    ("variant", "query_len", "num_heads", "page", "causal"),
    [
        ("swap", 2, 16, 64, False),
        ("swap", 3, 5, 16, True),
        ("swap", 2, 16, 128, False),
        ("asym", 4, 16, 64, True),
        ("asym", 3, 30, 32, False),
        ("asym", 4, 7, 128, True),
        ("asym", 3, 30, 64, True),
        ("asym", 3, 30, 16, False),
        ("swap_fp8", 2, 16, 64, True),
        ("swap_fp8", 3, 5, 16, False),
        ("asym_fp8", 4, 16, 64, True),
        ("asym_fp8", 3, 30, 16, False),
        ("asym_fp8", 4, 7, 32, False),
        ("asym_fp8", 3, 30, 128, True),
    ],
)
def test_agrees_with_float64(plan_kernel, variant, query_len, num_heads, causal, page):
    case = make_case(
        plan_kernel,
        LENS,
        query_len=query_len,
        num_heads=num_heads,
        page=page,
        causal=causal,
        num_parts=5,
        dtype=query_dtype(variant) if page == 16 else torch.bfloat16,
        fp8="fp8" in variant,
        seed=page,
    )
    check(simulate(case, variant, seed=page), case.expected)


@pytest.mark.parametrize("variant", ["swap", "swap_fp8"])
@pytest.mark.parametrize(
    ("query_len", "num_heads", "causal"), [(3, 13, True), (4, 16, False)]
)
def test_many_rows_are_shared_by_programs_of_few(
    plan_kernel, variant, query_len, num_heads, causal
):
    case = make_case(
        plan_kernel,
        LENS,
        query_len=query_len,
        num_heads=num_heads,
        page=32,
        causal=causal,
        num_parts=5,
        fp8="fp8" in variant,
    )
    check(simulate(case, variant, rows=16), case.expected)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "num_parts"), [(16, 1), (32, 9), (64, 3), (128, 9)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("variant", "query_len", "num_heads"),
    [
        ("swap", 3, 5),
        ("swap_fp8", 2, 16),
        ("asym", 4, 16),
        ("asym", 3, 30),
        ("asym_fp8", 4, 16),
        ("asym_fp8", 3, 30),
    ],
)
def test_agrees_with_float64_on_the_whole_grid(
    plan_kernel, variant, query_len, num_heads, causal, page, num_parts
):
    case = make_case(
        plan_kernel,
        LENS,
        query_len=query_len,
        num_heads=num_heads,
        page=page,
        causal=causal,
        num_parts=num_parts,
        dtype=query_dtype(variant),
        fp8="fp8" in variant,
        seed=num_parts,
    )
    check(simulate(case, variant, seed=num_parts), case.expected)


@pytest.mark.parametrize(
    ("variant", "num_heads"),
    [("swap", 2), ("asym", 8), ("swap_fp8", 2), ("asym_fp8", 8)],
)
def test_a_piece_that_most_rows_do_not_see_is_empty_under_any_scale(
    plan_kernel, variant, num_heads
):
    case = make_case(
        plan_kernel,
        [577],
        query_len=8,
        num_heads=num_heads,
        page=64,
        causal=True,
        num_parts=10,
        fp8="fp8" in variant,
        scale=1.0,
    )
    parts = case.schedule[8 + 4 * 9 : 8 + 4 * 9 + 2]
    assert parts.tolist() == [0, 9]  # the last part begins at the last token alone
    check(simulate(case, variant), case.expected)


@pytest.mark.parametrize(("num_heads", "columns"), [(16, 512), (3, 128)])
def test_pages_may_lie_apart_and_pieces_are_merged(
    plan_kernel, merge_kernel, num_heads, columns
):
    case = make_case(
        plan_kernel,
        LENS,
        query_len=1,
        num_heads=num_heads,
        page=32,
        causal=False,
        num_parts=5,
        gap=40,
    )
    assert case.schedule[0] > 0
    merge = interpreted_merge(merge_kernel, columns=columns)
    check(simulate(case, "swap", merge=merge), case.expected)
