"""Idle ranks, dummy runs and padded batches: said, checked, or refused."""

import pytest
import torch
from fault_steps import CPU, SERVERS, Step, decoder_of, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import (
    BackendRefused,
    BatchError,
    CommonAttentionMetadata,
    StaleMetadataError,
)

EVERYWHERE = pytest.mark.parametrize("server", SERVERS)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def empty_batch():
    """A batch of no request, as an idle rank would describe it."""
    return CommonAttentionMetadata(
        query_start_loc=int32(0),
        query_start_loc_cpu=int32(0),
        seq_lens=int32(),
        num_reqs=0,
        num_actual_tokens=0,
        max_query_len=1,
        max_seq_len=0,
        block_table_tensor=torch.zeros(0, 1, dtype=torch.int32),
    )


@pytest.mark.fault("DP-01")
@EVERYWHERE
def test_a_dummy_step_of_pads_ends_the_life_of_the_step_before(server):
    problem = problem_of(needs_lse=True)
    decoder = decoder_of(problem, SERVERS[server])
    busy = Step(problem, decoder.device, [13])
    plan = decoder.plan(busy.common)
    busy.check(busy.run(decoder, plan))
    idle = Step(problem, decoder.device, [], pads=1)
    found = idle.run(decoder)
    assert not found.out.any()
    assert (found.lse == -torch.inf).all()
    with pytest.raises(StaleMetadataError):
        busy.run(decoder, plan)


@pytest.mark.fault("DP-01", "DP-05")
@EVERYWHERE
def test_a_batch_of_none_is_refused_before_anything_is_launched(server):
    problem = problem_of()
    decoder = decoder_of(problem, SERVERS[server])
    with pytest.raises(BatchError, match="num_reqs") as caught:
        decoder.plan(empty_batch())
    assert caught.value.got == "0"
    assert "skip the call for an empty batch" in caught.value.fix
    assert decoder.report() is None
    step = Step(problem, decoder.device, [13])
    step.check(step.run(decoder))


@pytest.mark.fault("DP-02")
@EVERYWHERE
def test_rows_and_lengths_must_agree_and_pads_are_named(server):
    problem = problem_of(needs_lse=True)
    decoder = decoder_of(problem, SERVERS[server])
    three = Step(problem, decoder.device, [5, 64, 9])
    four = Step(problem, decoder.device, [5, 64, 9], pads=1)
    with pytest.raises(StaleMetadataError) as caught:
        three.run(decoder, q=four.q)
    assert "[4, 16, 576]" in caught.value.got
    assert "[3, 16, 576]" in caught.value.allowed
    with pytest.raises(BatchError, match="seq_lens") as caught:
        decoder.plan(four.changed(seq_lens=three.common.seq_lens).common)
    assert "[3]" in caught.value.got
    assert "[4]" in caught.value.allowed
    for rows in (3, 4):  # as many tokens as are real, or with the pads counted
        padded = four.changed(num_actual_tokens=rows)
        found = padded.run(decoder)
        padded.check(found)
        assert not found.out[3].any()


@pytest.mark.fault("DP-03")
@settings(max_examples=40)
@given(
    rows=st.integers(1, 40),
    requests=st.integers(1, 33),
    starts=st.integers(2, 34),
)
def test_a_block_length_is_never_the_quotient_of_two_sizes(rows, requests, starts):
    problem = problem_of(2, (1, 2, 3, 4), max_num_reqs=32)
    decoder = decoder_of(problem, SERVERS["reference"])
    common = CommonAttentionMetadata(
        query_start_loc=torch.arange(starts, dtype=torch.int32),
        query_start_loc_cpu=torch.arange(starts, dtype=torch.int32),
        seq_lens=torch.ones(requests, dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=rows,
        max_query_len=1,
        max_seq_len=1,
        block_table_tensor=torch.zeros(requests, 1, dtype=torch.int32),
    )
    if rows == requests == starts - 1 <= 32:
        plan = decoder.plan(common)
        assert (plan.query_len, plan.num_decode_tokens) == (1, rows)
    else:
        with pytest.raises((BatchError, BackendRefused)):
            decoder.plan(common)


@pytest.mark.fault("DP-03")
def test_one_token_for_32_requests_is_31_pads_or_an_error():
    problem = problem_of(2, max_num_reqs=32, needs_lse=True)
    decoder = decoder_of(problem, SERVERS["reference"])
    step = Step(problem, CPU, [7], pads=31)
    step = step.changed(num_actual_tokens=1)
    assert decoder.plan(step.common).query_len == 1
    step.check(step.run(decoder))
    with pytest.raises(StaleMetadataError, match="geometry"):
        step.run(decoder, q=step.q[:1])
