"""The clause VALIDATE with ``validate="device"``: what only the device knows."""

from dataclasses import replace

import pytest
import torch

from mla_decode import BatchError, Dcp


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def build(plain_builder, cpu):
    def build(step, **changes):
        builder = plain_builder(step.problem, cpu, validate="device")
        return builder.build(replace(step.common, **changes))

    return build


def test_notes_the_highest_used_page_and_ignores_unused_slots(make_step, build):
    step = make_step(seq_lens=(40, 3), page_size=16)
    table = step.common.block_table_tensor
    highest = max(*table[0, :3].tolist(), int(table[1, 0]))
    assert build(step).last_page == highest
    assert build(make_step(seq_lens=(), pads=2)).last_page == -1


def test_by_default_nothing_of_this_is_read(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(40, 3), page_size=16)
    builder = plain_builder(step.problem, cpu)
    metadata = builder.build(replace(step.common, seq_lens=int32(-5, 10**6)))
    assert metadata.last_page == -1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": int32(0, 2, 6)}, "differs from its host copy"),
        ({"seq_lens": int32(40, -1)}, "outside its declared bound"),
        ({"seq_lens": int32(41, 9)}, "outside its declared bound"),
        ({"seq_lens": int32(40, 1)}, "longer than its sequence"),
        ({"block_table_tensor": int32(0, 1, 2, 0, -1, 0).view(2, 3)}, None),
        ({"block_table_tensor": int32(0, -1, 2, 0, 0, 0).view(2, 3)}, "negative"),
    ],
)
def test_refuses_lengths_and_slots_that_break_the_contract(
    make_step, build, changes, message
):
    step = make_step(seq_lens=(40, 9), query_len=2, page_size=16)
    if message is None:
        assert build(step, **changes).last_page == 2
        return
    with pytest.raises(BatchError, match=message) as caught:
        build(step, **changes)
    assert caught.value.fix


def test_a_refused_step_leaves_the_builder_as_it_was(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(40, 9))
    builder = plain_builder(step.problem, cpu, validate="device")
    kept = builder.build(step.common)
    with pytest.raises(BatchError):
        builder.build(replace(step.common, seq_lens=int32(-1, 9)))
    assert kept.require_current() is builder


def test_a_non_causal_block_may_be_longer_than_its_sequence(make_step, build):
    step = make_step(seq_lens=(40, 1), query_len=2, causal=False)
    assert build(step).causal is False


def test_a_pad_has_no_keys(make_step, build):
    step = make_step(seq_lens=(40,), pads=1)
    with pytest.raises(BatchError, match="pad request has keys"):
        build(step, seq_lens=int32(40, 3))


def test_a_rank_holds_no_more_keys_than_the_request(make_step, build):
    step = make_step(seq_lens=(40, 9), page_size=16, dcp=Dcp(world=2))
    assert build(step, dcp_local_seq_lens=int32(20, 5)).seq_lens.tolist() == [20, 5]
    for local in (int32(20, 10), int32(20, -1)):
        with pytest.raises(BatchError, match="more keys than the request"):
            build(step, dcp_local_seq_lens=local)


def test_forward_compares_the_highest_page_with_the_cache(
    make_step, plain_backend, plain_builder, cpu
):
    step = make_step(seq_lens=(40, 9), page_size=16)
    builder = plain_builder(step.problem, cpu, validate="device")
    metadata = builder.build(step.common)
    few = step.kv_cache[: metadata.last_page]
    with pytest.raises(BatchError, match="past the cache"):
        plain_backend.forward(step.q, few, metadata, **step.arguments)
    enough = step.kv_cache[: metadata.last_page + 1]
    plain_backend.forward(step.q, enough, metadata, **step.arguments)
