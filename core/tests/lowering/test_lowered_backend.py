"""What a lowered backend says of itself, and the corners of planning."""

import dataclasses

import pytest
import torch

from mla_decode import DecodeProblem, DeviceInfo, Mask
from mla_decode.lowering.planner import nearest_refusals

CPU = DeviceInfo.assume("cpu")


def problem(heads, query_lens, masks, **kwargs):
    return DecodeProblem(
        **{
            "num_q_heads": heads,
            "query_lens": query_lens,
            "masks": masks,
            "q_dtype": "fp32",
            "kv_dtype": "fp32",
            "out_dtype": "fp32",
            "page_size": 16,
            "max_num_reqs": 4,
            "max_model_len": 128,
            **kwargs,
        }
    )


def test_it_accepts_its_own_problem_and_answers_for_any_other_as_the_inner_does(
    narrow, decoder
):
    inner = narrow({(1, Mask.CAUSAL, 16): 2})
    asked = problem(4, {4}, {Mask.NON_CAUSAL})
    lowered = decoder(inner, asked).backend
    other = dataclasses.replace(asked, num_q_heads=5)
    assert lowered.refusals(asked, CPU) == []
    assert lowered.refusals(other, CPU) == inner.refusals(other, CPU) != []
    assert lowered.supports_non_causal(CPU)
    assert lowered.capability is inner.capability
    assert (lowered.name, lowered.deterministic) == ("narrow", inner.deterministic)
    assert lowered.cost(asked, CPU).kv_walks == 2


def test_a_causal_plan_claims_no_non_causal_block(narrow, decoder):
    inner = narrow({(1, Mask.CAUSAL, 4): 1})
    lowered = decoder(inner, problem(4, {4}, {Mask.CAUSAL})).backend
    assert not lowered.supports_non_causal(CPU)


@pytest.mark.parametrize("reads", [True, False])
def test_it_reads_lengths_on_the_host_where_the_inner_does(
    narrow, decoder, monkeypatch, reads
):
    inner = narrow({(1, Mask.CAUSAL, 16): 1})
    monkeypatch.setattr(inner.builder_cls, "host_reads_lengths", reads)
    lowered = decoder(inner, problem(4, {4}, {Mask.NON_CAUSAL})).backend
    assert lowered.builder_cls.host_reads_lengths is reads


@pytest.mark.parametrize("passes_out", [True, False])
@pytest.mark.parametrize("needs_lse", [True, False])
def test_a_padded_block_gives_its_rows_with_and_without_an_lse(
    narrow, decoder, batch_of, needs_lse, passes_out
):
    asked = problem(3, {5}, {Mask.NON_CAUSAL}, needs_lse=needs_lse)
    padded = decoder(narrow({(1, Mask.CAUSAL, 16): 1}), asked)
    assert padded.selection.plan.kind == "pad"
    common, q, cache = batch_of([9, 40], [5, 5], causal=False, heads=3)
    out = torch.full((10, 3, 512), torch.nan) if passes_out else None
    found = padded.run(q, cache, padded.plan(common), softmax_scale=0.07, out=out)
    exact = decoder(narrow({(5, Mask.NON_CAUSAL, 3): 1}), asked)
    native = exact.run(q, cache, exact.plan(common), softmax_scale=0.07)
    assert (found.out is out) == passes_out
    torch.testing.assert_close(found.out, native.out)
    assert (found.lse is None) != needs_lse
    if needs_lse:
        torch.testing.assert_close(found.lse, native.lse)


def test_the_nearest_refusals_speak_only_of_blocks_without_a_plan(narrow):
    inner = narrow({(3, Mask.CAUSAL, 4): 1})
    asked = problem(4, {3}, {Mask.CAUSAL, Mask.NON_CAUSAL})
    found = nearest_refusals(asked, inner, CPU)
    served = nearest_refusals(problem(4, {3}, {Mask.CAUSAL}), inner, CPU)
    assert found
    assert served == []


def test_a_lone_token_of_many_heads_has_no_rewrite_to_speak_of(narrow):
    inner = narrow({(1, Mask.CAUSAL, 4): 1})
    assert nearest_refusals(problem(200, {1}, {Mask.CAUSAL}), inner, CPU) == []


def test_blocks_that_become_the_same_problem_share_a_builder(narrow, decoder, batch_of):
    inner = narrow({(1, Mask.CAUSAL, 16): 1})
    lowered = decoder(inner, problem(4, {2, 4}, {Mask.NON_CAUSAL}))
    kinds = [block.rewrite.kind for block in lowered.selection.plan.blocks]
    assert kinds == ["pad", "fold"]
    exact = decoder(
        narrow({(2, Mask.NON_CAUSAL, 4): 1, (4, Mask.NON_CAUSAL, 4): 1}),
        problem(4, {2, 4}, {Mask.NON_CAUSAL}),
    )
    for query_len in (2, 4, 2):
        common, q, cache = batch_of([7, 40], [query_len] * 2, causal=False)
        found, native = (
            one.run(q, cache, one.plan(common), softmax_scale=0.07)
            for one in (lowered, exact)
        )
        torch.testing.assert_close(found.out, native.out)
