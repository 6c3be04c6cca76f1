"""Bits that hang on nothing but a token's own keys, and memory that a cap bounds."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton_steps import Step, make_step, relative_error

from mla_decode import DecodeProblem, DeviceInfo, Mask, MLADecoder
from mla_decode.workspace import core_bytes, held_bytes
from mla_decode_triton import chosen_backend
from mla_decode_triton.planning import plan_step, workspace_bytes
from mla_decode_triton.tiles import ARCH_TILES

backend = chosen_backend("portable")
SM_90 = DeviceInfo.assume("sm_90")
LENS = (250, 129, 33)
"""129 keys are a tile more than 128: an equal share would be cut elsewhere."""


def problem_of(**fields):
    defaults = {
        "num_q_heads": 2,
        "query_lens": {1, 2},
        "masks": set(Mask),
        "max_num_reqs": 8,
        "max_model_len": 256,
        "needs_lse": True,
        "out_dtype": "fp32",
        "batch_invariant": True,
    }
    return DecodeProblem(**{**defaults, **fields})


def alone(step: Step, request: int, query_len: int) -> Step:
    """One request of a step, as a batch of its own."""
    starts = torch.tensor([0, query_len], dtype=torch.int32)
    rows = slice(request, request + 1)
    common = replace(
        step.common,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=step.common.seq_lens[rows],
        num_reqs=1,
        num_actual_tokens=query_len,
        max_seq_len=int(step.common.seq_lens[request]),
        block_table_tensor=step.common.block_table_tensor[rows],
    )
    q = step.q[request * query_len : (request + 1) * query_len]
    return replace(step, common=common, q=q)


@pytest.mark.parametrize("mask", list(Mask))
def test_a_requests_bits_do_not_hang_on_its_neighbours(mask):
    problem = problem_of()
    step = make_step(problem, SM_90, LENS, query_len=2, causal=mask is Mask.CAUSAL)
    builder = backend.builder_cls(problem, SM_90)
    together = step.run(builder)
    assert relative_error(together.out, step.oracle()[0]) < 8e-3
    for request in range(len(LENS)):
        rows = slice(request * 2, request * 2 + 2)
        apart = alone(step, request, 2).run(builder)
        assert torch.equal(apart.out, together.out[rows])
        assert torch.equal(apart.lse, together.lse[rows])


def test_every_token_of_a_verified_block_has_the_bits_of_its_own_decode():
    problem = problem_of()
    step = make_step(problem, SM_90, LENS, query_len=2, causal=True)
    builder = backend.builder_cls(problem, SM_90)
    block = step.run(builder)
    for token in range(2):
        starts = torch.arange(4, dtype=torch.int32)
        common = replace(
            step.common,
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=step.common.seq_lens - (1 - token),
            num_actual_tokens=3,
            max_query_len=1,
        )
        single = replace(step, common=common, q=step.q[token::2]).run(builder)
        assert torch.equal(single.out, block.out[token::2])
        assert torch.equal(single.lse, block.lse[token::2])


def test_without_the_option_the_batch_shapes_the_splits():
    plans = {
        invariant: {
            plan_step(
                problem_of(batch_invariant=invariant, max_model_len=32768),
                ARCH_TILES["sm_90"],
                num_reqs=num_reqs,
                query_len=query_len,
                max_seq_len=max_seq_len,
            ).num_splits
            for num_reqs in (1, 2, 8)
            for query_len in (1, 2)
            for max_seq_len in (4096, 32768)
        }
        for invariant in (False, True)
    }
    assert len(plans[True]) == 1
    assert len(plans[False]) > 1


def test_a_short_longest_request_is_not_cut():
    problem = problem_of(max_model_len=32)
    builder = backend.builder_cls(problem, SM_90)
    step = make_step(problem, SM_90, (20, 9), query_len=1, causal=True)
    assert builder.build(step.common).facts().max_splits == 1
    assert workspace_bytes(problem, ARCH_TILES["sm_90"]) == 0


problems = st.builds(
    problem_of,
    num_q_heads=st.integers(1, 20),
    query_lens=st.sets(st.integers(1, 8), min_size=1),
    max_num_reqs=st.integers(1, 6),
    max_model_len=st.integers(8, 4096),
    max_splits=st.none() | st.integers(1, 64),
    batch_invariant=st.booleans(),
    graphs=st.booleans(),
)


@given(problem=problems)
def test_a_builder_holds_what_the_cost_says(problem):
    builder = backend.builder_cls(problem, SM_90)
    held = held_bytes(builder) - core_bytes(problem, joins=False)
    assert held == backend.cost(problem, SM_90).workspace_bytes


@given(
    problem=problems,
    arch=st.sampled_from(sorted(ARCH_TILES)),
    caps=st.lists(st.integers(1, 200), min_size=2, max_size=4),
)
def test_the_workspace_grows_with_the_cap_and_no_step_outgrows_it(problem, arch, caps):
    tiles = ARCH_TILES[arch]
    sizes = []
    for cap in (*sorted(caps), None):
        capped = replace(problem, max_splits=cap)
        sizes.append(workspace_bytes(capped, tiles))
        for num_reqs in range(1, problem.max_num_reqs + 1):
            plan = plan_step(
                capped,
                tiles,
                num_reqs=num_reqs,
                query_len=problem.max_query_len,
                max_seq_len=problem.max_model_len,
            )
            assert plan.num_splits <= (cap or plan.num_splits)
            assert plan.partial_rows * 513 * 4 <= sizes[-1]
    assert sizes == sorted(sizes)


def test_a_large_batch_of_many_heads_fits_any_budget_that_a_cap_buys():
    sizes = [
        backend.workspace_bytes(
            problem_of(
                num_q_heads=128,
                query_lens={1},
                max_num_reqs=512,
                max_model_len=131072,
                max_splits=cap,
                batch_invariant=False,
            ),
            SM_90,
        )
        for cap in (1, 16, None)
    ]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)


def test_a_report_names_the_kernels_and_the_splits():
    problem = problem_of()
    step = make_step(problem, SM_90, LENS, query_len=2, causal=False)
    decoder = MLADecoder(problem, "triton_mla", device=SM_90)
    decoder.plan(step.common)
    report = decoder.report()
    assert report.kernels == ("decode_kernel", "merge_kernel")
    assert report.max_splits > 1
    assert report.batch_invariant
    assert (report.kernel_num_q_heads, report.kernel_query_len) == (2, 2)
    assert report.workspace_bytes == decoder.selection.workspace.total
