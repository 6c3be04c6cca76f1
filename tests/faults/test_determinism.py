"""The same bits: twice, whatever the batch, or a refusal that says who cannot."""

import pytest
import torch
from fault_steps import CPU, SERVERS, Step, codes, decoder_of, problem_of, refusals
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import Feature, Support, discover
from mla_decode.reference import ReferenceBackend

EVERYWHERE = pytest.mark.parametrize("server", SERVERS)


def declares(server, feature):
    """Whether the row of a server's device has a feature."""
    name, device = SERVERS[server]
    row = discover()[name].backend.capability.row(device.arch)
    return row.features.get(feature) is Support.YES


WITH_CAP = [name for name in SERVERS if declares(name, Feature.SPLIT_CAP)]
INVARIANT = [name for name in SERVERS if declares(name, Feature.BATCH_INVARIANCE)]


def bits(output):
    return output.out.view(torch.int16)


@pytest.mark.fault("DETERM-02")
@EVERYWHERE
def test_the_same_call_gives_the_same_bits_every_time(server):
    problem = problem_of(deterministic=True)
    decoder = decoder_of(problem, SERVERS[server])
    assert decoder.backend.deterministic
    is_quick = server != "interpreted Triton"
    step = Step(problem, decoder.device, [300, 70] if is_quick else [70, 9])
    first = step.run(decoder)
    step.check(first)
    for _ in range(4 if is_quick else 2):
        assert torch.equal(bits(step.run(decoder)), bits(first))
    assert decoder.report().deterministic


@pytest.mark.fault("DETERM-02")
@EVERYWHERE
def test_a_cap_on_splits_is_kept_or_refused(server):
    for cap in (1, 2, 8):
        problem = problem_of(max_splits=cap)
        if server not in WITH_CAP:
            assert codes(problem, SERVERS[server]) == {"feature"}
            continue
        decoder = decoder_of(problem, SERVERS[server])
        step = Step(problem, decoder.device, [150, 9])
        step.check(step.run(decoder))
        assert decoder.report().max_splits <= cap
    assert set(WITH_CAP) >= {"reference", "interpreted Triton"}


class Restless(ReferenceBackend):
    """A backend whose bits differ, and that says so."""

    name = "restless"
    deterministic = False


@pytest.mark.fault("DETERM-02", "DETERM-04")
@pytest.mark.parametrize("asked", ["deterministic", "batch_invariant"])
def test_a_backend_that_does_not_repeat_its_bits_is_refused_where_it_must(asked):
    server = (Restless(), CPU)
    assert not decoder_of(problem_of(), server).backend.deterministic
    (reason,) = refusals(problem_of(**{asked: True}), server)
    assert str(reason.code) == "determinism"
    assert "another backend" in reason.fix


def alone(step, request, row):
    """One token of a step's block as a step of its own."""
    lens = step.common.seq_lens[request : request + 1]
    block = step.problem.max_query_len
    single = step.changed(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=lens - (block - 1 - row),
        num_reqs=1,
        num_actual_tokens=1,
        max_query_len=1,
        block_table_tensor=step.common.block_table_tensor[request : request + 1],
    )
    single.q = step.q[request * block + row : request * block + row + 1]
    return single


@pytest.mark.fault("DETERM-03")
@pytest.mark.parametrize("server", INVARIANT)
def test_a_token_has_its_bits_alone_in_a_block_and_among_others(server):
    problem = problem_of(16, {1, 4}, batch_invariant=True, max_model_len=384)
    decoder = decoder_of(problem, SERVERS[server])
    lens = [70, 20] if server == "interpreted Triton" else [300, 20, 64, 129]
    step = Step(problem, decoder.device, lens)
    together = step.run(decoder)
    step.check(together)
    for request, row in ((0, 3), (0, 0), (1, 2)):
        one = alone(step, request, row)
        found = bits(
            decoder.run(
                one.q, one.kv_cache, decoder.plan(one.common), softmax_scale=192**-0.5
            )
        )
        at = request * 4 + row
        assert torch.equal(found, bits(together)[at : at + 1]), (request, row)
    assert decoder.report().batch_invariant


@pytest.mark.fault("DETERM-04")
@EVERYWHERE
def test_who_cannot_keep_bits_over_batches_is_refused_by_that_code(server):
    problem = problem_of(batch_invariant=True)
    if server in INVARIANT:
        assert decoder_of(problem, SERVERS[server]).problem.deterministic
        return
    for lowering in ("refuse", "exact"):
        (reason,) = refusals(problem, SERVERS[server], lowering)
        assert str(reason.code) == "determinism"
        assert "batch_invariance" in reason.got
    assert "another backend" in reason.fix


@pytest.mark.fault("DETERM-03")
@settings(max_examples=20)
@given(
    lens=st.lists(st.integers(4, 90), min_size=1, max_size=5),
    data=st.data(),
    page_size=st.sampled_from([1, 16, 64]),
)
def test_the_references_bits_hang_on_no_neighbour(lens, data, page_size):
    problem = problem_of(2, {1, 4}, page_size=page_size, batch_invariant=True)
    decoder = decoder_of(problem, SERVERS["reference"])
    step = Step(problem, CPU, lens)
    together = step.run(decoder)
    request = data.draw(st.integers(0, len(lens) - 1))
    row = data.draw(st.integers(0, 3))
    one = alone(step, request, row)
    found = decoder.run(
        one.q, one.kv_cache, decoder.plan(one.common), softmax_scale=192**-0.5
    )
    at = request * 4 + row
    assert torch.equal(bits(found), bits(together)[at : at + 1])
