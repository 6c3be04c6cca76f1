"""Plans over FlashMLA: its walks are known from the rows, so little is asked of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_decode import DecodeProblem, DeviceInfo, Mask
from mla_decode.lowering import plan_exact
from mla_decode.lowering.planner import price
from mla_decode.lowering.rewrites import native, rewrites
from mla_decode_cuda_flashmla import backend

SM_90 = DeviceInfo.assume("sm_90")


def problem_of(heads, query_len, mask, **words):
    return DecodeProblem(
        num_q_heads=heads, query_lens={query_len}, masks={mask}, **words
    )


@given(
    heads=st.sampled_from((1, 7, 16, 64, 128, 4096)),
    query_len=st.integers(1, 16),
    mask=st.sampled_from(list(Mask)),
    dtype=st.sampled_from(("bf16", "fp8")),
    needs_lse=st.booleans(),
)
def test_the_plan_is_the_cheapest_of_all_that_are_not_refused(
    heads, query_len, mask, dtype, needs_lse
):
    problem = problem_of(
        heads, query_len, mask, q_dtype=dtype, kv_dtype=dtype, needs_lse=needs_lse
    )
    ((query_len, mask),) = problem.blocks()
    answers = backend.answers(SM_90)
    legal = []
    for rewrite in (
        native(problem, query_len, mask),
        *rewrites(problem, query_len, mask, range(1, 1 << 16)),
    ):
        lowered = rewrite.lowered
        if backend.refusals(lowered, SM_90):
            continue
        ((length, seen),) = lowered.blocks()
        bound = answers.fewest_walks(problem, length, seen, lowered.num_q_heads)
        assert bound == backend.cost(lowered, SM_90).kv_walks
        legal.append(price(rewrite, answers).rank)
    plan = plan_exact(problem, backend, SM_90)
    assert (plan is None) == (not legal)
    if plan is not None:
        assert plan.blocks[0].rank == min(legal)


@pytest.mark.parametrize("release", ["2025.4", "2026.4"])
def test_an_assumed_library_is_inspected_once(release):
    from mla_decode_cuda_flashmla.library import library_for

    device = DeviceInfo.assume("sm_90", libraries={"flash-mla": release})
    assert library_for(device) is library_for(device)
    assert library_for(device).version == release
