"""The planner: legal, minimal, pure, and quick."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mla_decode import BackendRefused, DecodeProblem, DeviceInfo, Mask
from mla_decode.answers import answers_of
from mla_decode.lowering import plan_exact
from mla_decode.lowering.planner import price
from mla_decode.lowering.rewrites import PAD_WIDTHS, native, rewrites

CPU = DeviceInfo.assume("cpu")
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def problem_of(heads, query_lens, masks, **kwargs):
    return DecodeProblem(
        num_q_heads=heads,
        q_dtype="fp32",
        kv_dtype="fp32",
        out_dtype="fp32",
        page_size=16,
        query_lens=frozenset(query_lens),
        masks=frozenset(masks),
        max_num_reqs=4,
        max_model_len=128,
        **kwargs,
    )


kernels = st.dictionaries(
    st.tuples(
        st.integers(1, 8), st.sampled_from(list(Mask)), st.sampled_from(WIDTHS)
    ).map(lambda key: (key[0], Mask.CAUSAL if key[0] == 1 else key[1], key[2])),
    st.integers(1, 8),
    min_size=1,
    max_size=12,
)


@given(
    walks=kernels,
    heads=st.sampled_from((1, 2, 3, 4, 8, 16)),
    query_len=st.integers(1, 6),
    mask=st.sampled_from(list(Mask)),
)
def test_the_plan_is_legal_and_the_cheapest_of_all_rewrites(
    narrow, walks, heads, query_len, mask
):
    backend = narrow(walks)
    problem = problem_of(heads, {query_len}, {mask})
    everything = [
        native(problem, query_len, mask),
        *rewrites(problem, query_len, mask, range(1, 1025)),
    ]
    legal = [
        price(rewrite, answers_of(backend, CPU))
        for rewrite in everything
        if not backend.refusals(rewrite.lowered, CPU)
    ]
    plan = plan_exact(problem, backend, CPU)
    if not legal:
        assert plan is None
        return
    (block,) = plan.blocks
    assert not backend.refusals(block.rewrite.lowered, CPU)
    assert block.rank == min(other.rank for other in legal)


@pytest.mark.parametrize(
    ("walks", "heads", "query_len", "kind", "group", "kv_walks"),
    [
        ({(1, Mask.CAUSAL, 96): 1}, 16, 6, "fold", 6, 1),
        ({(1, Mask.CAUSAL, 96): 6, (1, Mask.CAUSAL, 128): 1}, 16, 6, "pad", 6, 1),
        ({(1, Mask.CAUSAL, 96): 1, (8, Mask.NON_CAUSAL, 48): 8}, 48, 8, "split", 2, 4),
        ({(3, Mask.NON_CAUSAL, 16): 1}, 16, 2, "pad", 2, 1),
        ({(6, Mask.NON_CAUSAL, 16): 1}, 16, 6, "native", 6, 1),
        ({(6, Mask.NON_CAUSAL, 32): 1}, 16, 6, "pad", 6, 1),
    ],
)
def test_the_plans_that_the_design_names(
    narrow, walks, heads, query_len, kind, group, kv_walks
):
    plan = plan_exact(
        problem_of(heads, {query_len}, {Mask.NON_CAUSAL}), narrow(walks), CPU
    )
    (block,) = plan.blocks
    assert (plan.kind, block.rewrite.group, plan.cost.kv_walks) == (
        kind,
        group,
        kv_walks,
    )


def test_a_native_plan_wins_a_tie_and_nothing_more(narrow):
    problem = problem_of(16, {4}, {Mask.NON_CAUSAL})
    tied = narrow({(4, Mask.NON_CAUSAL, 16): 1, (1, Mask.CAUSAL, 64): 1})
    assert plan_exact(problem, tied, CPU).kind == "native"
    dearer = narrow({(4, Mask.NON_CAUSAL, 16): 2, (1, Mask.CAUSAL, 64): 1})
    assert plan_exact(problem, dearer, CPU).kind == "fold"


def test_a_causal_block_is_never_folded_nor_given_tokens(narrow):
    problem = problem_of(16, {4}, {Mask.CAUSAL})
    assert plan_exact(problem, narrow({(1, Mask.CAUSAL, 64): 1}), CPU) is not None
    for rewrite in rewrites(problem, 4, Mask.CAUSAL, range(1, 1025)):
        assert rewrite.pad_tokens == 0
        assert not rewrite.is_folded or rewrite.group == 1


def test_blocks_are_planned_apart_and_the_plan_prints(narrow):
    backend = narrow(
        {
            (1, Mask.CAUSAL, 16): 1,
            (7, Mask.CAUSAL, 16): 1,
            (1, Mask.CAUSAL, 96): 1,
            (1, Mask.CAUSAL, 112): 1,
        }
    )
    problem = problem_of(16, {1, 6, 7}, {Mask.CAUSAL, Mask.NON_CAUSAL})
    plan = plan_exact(problem, backend, CPU)
    kinds = {
        (block.rewrite.query_len, str(block.rewrite.mask)): block.rewrite.kind
        for block in plan.blocks
    }
    assert kinds == {
        (1, "causal"): "native",
        (6, "causal"): "split",
        (6, "non_causal"): "fold",
        (7, "causal"): "native",
        (7, "non_causal"): "fold",
    }
    printed = json.loads(json.dumps(plan.as_dict()))
    assert printed["kind"] == "split"
    assert [block["kind"] for block in printed["blocks"]] == list(kinds.values())


def test_without_a_plan_the_refusals_of_the_original_and_the_nearest_are_raised(
    narrow, decoder
):
    backend = narrow({(1, Mask.CAUSAL, 7): 1})
    with pytest.raises(BackendRefused) as refused:
        decoder(backend, problem_of(16, {4}, {Mask.NON_CAUSAL}))
    assert "narrow" in refused.value.refused
    nearest = [r for r in refused.value.refusals if "as a rewrite" in r.message]
    assert any("num_heads" in str(r.code) for r in nearest)
    assert "64" in " ".join(r.got for r in nearest)


def test_planning_is_cached_by_value(narrow):
    backend = narrow({(1, Mask.CAUSAL, width): 1 for width in PAD_WIDTHS})
    first = plan_exact(problem_of(16, {6}, {Mask.NON_CAUSAL}), backend, CPU)
    again = plan_exact(problem_of(16, {6}, {Mask.NON_CAUSAL}), backend, CPU)
    assert again is first
