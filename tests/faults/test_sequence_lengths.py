"""Faults of short, empty and padded requests."""

import pytest
import torch
from fault_steps import SERVERS, Recorded, Step, decoder_of, problem_of, serve

from mla_decode import BatchError, QueryLenSupport
from mla_decode.dcp import merge_partials

GRAPHS = [name for name in SERVERS if name != "reference"]


@pytest.mark.fault("SEQLEN-02")
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("slot", [-1, 2_147_480_000])
def test_padded_rows_are_written_and_their_pages_never_read(name, slot):
    problem = problem_of(2, needs_lse=True)
    for words in ({"pads": 2}, {}):
        lens = [5] if words else [5, 0, 0]
        _, _, found = serve(problem, SERVERS[name], lens, slot=slot, **words)
        assert found.lse[1:].isneginf().all()


@pytest.mark.fault("SEQLEN-02")
@pytest.mark.parametrize("name", GRAPHS)
def test_padded_rows_of_a_replay_are_written_too(name):
    problem = problem_of(2, needs_lse=True, graphs=True, max_model_len=128)
    decoder = decoder_of(problem, SERVERS[name])
    step = Step(problem, decoder.device, [70, 70, 70])
    recorded = Recorded(decoder, step)
    table = step.common.block_table_tensor.clone()
    table[0, 1:] = -1
    table[1:] = -1
    padded = step.with_lens([5, 0, 0], live=1).changed(block_table_tensor=table)
    assert recorded.replay(padded).lse[1:].isneginf().all()
    recorded.replay(step)


@pytest.mark.fault("SEQLEN-03")
@pytest.mark.parametrize("name", SERVERS)
def test_real_rows_do_not_hang_on_the_length_of_a_pad(name):
    problem = problem_of(2, 2)
    decoder = decoder_of(problem, SERVERS[name])
    step = Step(problem, decoder.device, [9, 70, 2])
    zero, one = (step.with_lens([9, 70, fill], live=2) for fill in (0, 1))
    found = [padded.run(decoder).out[:4].clone() for padded in (zero, one)]
    assert torch.equal(*found)
    zero.check(zero.run(decoder))
    strict = decoder_of(problem, SERVERS[name], validate="device")
    zero.check(zero.run(strict))
    with pytest.raises(BatchError, match="pad request has keys") as caught:
        strict.plan(one.common)
    assert "zero the seq_lens" in caught.value.fix


@pytest.mark.fault("SEQLEN-04")
@pytest.mark.parametrize("name", SERVERS)
def test_an_empty_part_has_no_weight_in_a_merge(name):
    problem = problem_of(2, needs_lse=True)
    decoder, _, first = serve(problem, SERVERS[name], [0, 7])
    second = Step(problem, decoder.device, [5, 5], seed=1).run(decoder)
    out, lse = merge_partials(
        torch.stack((first.out, second.out)), torch.stack((first.lse, second.lse))
    )
    assert torch.equal(out[0], second.out[0].float())
    assert torch.equal(lse[0], second.lse[0])
    assert out.isfinite().all()


@pytest.mark.fault("SEQLEN-05")
@pytest.mark.parametrize("name", SERVERS)
def test_a_ragged_batch_gives_its_rows_packed_and_no_more(name):
    problem = problem_of(2, {1, 3})
    decoder = decoder_of(problem, SERVERS[name])
    ragged = Step(problem, decoder.device, [9, 70], blocks=[1, 3])
    if decoder.builder.query_len_support is not QueryLenSupport.VARLEN:
        with pytest.raises(BatchError, match="mixes block lengths") as caught:
            decoder.plan(ragged.common)
        assert "split the batch by block length" in caught.value.fix
        ragged = Step(problem, decoder.device, [9, 70], blocks=[3, 3])
    plan = decoder.plan(ragged.common)
    found = decoder.run(ragged.q, ragged.kv_cache, plan, softmax_scale=192**-0.5)
    assert found.out.shape[0] == int(ragged.common.query_start_loc_cpu[-1])
    ragged.check(found)


@pytest.mark.fault("SEQLEN-07")
@pytest.mark.parametrize("name", SERVERS)
def test_a_batch_without_a_key_is_planned_captured_and_decoded(name):
    for problem in (problem_of(2, needs_lse=True), problem_of(2, 4, needs_lse=True)):
        for words in ({"seq_lens": [0] * 4}, {"seq_lens": [], "pads": 4}):
            _, _, found = serve(problem, SERVERS[name], **words)
            assert not found.out.any()
            assert found.lse.isneginf().all()
    if name in GRAPHS:
        problem = problem_of(2, needs_lse=True, graphs=True, max_model_len=128)
        decoder = decoder_of(problem, SERVERS[name])
        step = Step(problem, decoder.device, [70] * 2)
        recorded = Recorded(decoder, step.with_lens([0] * 2))
        recorded.replay(step)


@pytest.mark.fault("SEQLEN-08")
@pytest.mark.parametrize("name", GRAPHS)
def test_a_smaller_batch_in_a_larger_graph_refreshes_the_tail(name):
    problem = problem_of(2, 4, graphs=True, max_model_len=128)
    decoder = decoder_of(problem, SERVERS[name])
    step = Step(problem, decoder.device, [80] * 8)
    step = step.with_lens([70, 9, 4, 80, 64, 65, 12, 33])
    recorded = Recorded(decoder, step)
    recorded.replay(step.with_lens([64, 5, 70, 0, 0, 0, 0, 0], live=3))
    newest = decoder.plan(step.with_lens([64, 5, 70, 0, 0, 0, 0, 0], live=3).common)
    assert newest.seq_lens.tolist() == [64, 5, 70, 0, 0, 0, 0, 0]
    assert newest.seq_lens.data_ptr() == recorded.plan.seq_lens.data_ptr()
    if name == "simulated AITER":
        assert newest.kv_indptr.tolist() == [0, 64, 69, *[139] * 6]
    recorded.replay(step)
