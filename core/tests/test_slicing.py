"""The clause UBATCH: cuts keep every field, and builders keep to themselves."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_decode import (
    BatchError,
    CommonAttentionMetadata,
    MaskError,
    UbatchBuilders,
    split_decodes,
    split_ubatches,
)


def values(common):
    """A batch as comparable values."""
    return {
        field.name: value.tolist() if isinstance(value, torch.Tensor) else value
        for field in fields(CommonAttentionMetadata)
        for value in [getattr(common, field.name)]
    }


@given(
    blocks=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    pads=st.integers(0, 3),
    causal=st.booleans(),
    cuts=st.data(),
)
def test_parts_hold_every_request_and_every_field_once(
    make_step, blocks, pads, causal, cuts
):
    step = make_step(seq_lens=(8,) * len(blocks), query_lens=blocks, pads=pads)
    local = step.common.seq_lens // 2
    common = replace(step.common, causal=causal, dcp_local_seq_lens=local)
    number = cuts.draw(st.integers(1, common.num_reqs))
    parts = split_ubatches(common, number)
    assert len(parts) == number
    assert sum(part.num_reqs for part in parts) == common.num_reqs
    assert sum(part.num_actual_tokens for part in parts) == common.num_actual_tokens
    assert {part.causal for part in parts} == {causal}
    assert {part.max_seq_len for part in parts} == {common.max_seq_len}
    for name in (
        "seq_lens",
        "block_table_tensor",
        "slot_mapping",
        "dcp_local_seq_lens",
    ):
        whole = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(whole, getattr(common, name)), name
    lengths = torch.cat([part.query_start_loc_cpu.diff() for part in parts])
    assert torch.equal(lengths, common.query_start_loc_cpu.diff())
    for part in parts:
        assert part.query_start_loc_cpu[0] == 0
        assert torch.equal(part.query_start_loc, part.query_start_loc_cpu)
        assert part.max_query_len >= int(part.query_start_loc_cpu.diff().max())


def test_no_field_of_the_batch_is_forgotten(make_step):
    step = make_step(seq_lens=(8, 8), causal=False)
    whole = split_ubatches(
        replace(step.common, dcp_local_seq_lens=step.common.seq_lens), 1
    )[0]
    assert values(whole) == values(
        replace(step.common, dcp_local_seq_lens=step.common.seq_lens)
    )


def test_optional_fields_stay_absent(make_step):
    step = make_step(seq_lens=(8, 8)).with_common(slot_mapping=None)
    for part in split_ubatches(step.common, 2):
        assert part.slot_mapping is None
        assert part.dcp_local_seq_lens is None


def test_the_mask_of_the_parts_is_the_one_that_was_named(make_step):
    step = make_step(seq_lens=(8, 8), query_len=2)
    tensor = step.with_common(causal=torch.tensor([False, False]))
    assert [part.causal for part in split_ubatches(tensor.common, 2)] == [False] * 2
    with pytest.raises(MaskError):
        split_ubatches(step.with_common(causal=None).common, 2)


def test_a_part_of_pads_alone_has_the_batchs_block_length(make_step):
    step = make_step(seq_lens=(8,), query_len=3, pads=1).with_common(max_query_len=7)
    real, pad = split_ubatches(step.common, 2)
    assert (real.max_query_len, pad.max_query_len) == (3, 3)
    assert (real.num_actual_tokens, pad.num_actual_tokens) == (3, 3)
    empty = make_step(seq_lens=(), query_len=3, pads=2)
    assert [part.max_query_len for part in split_ubatches(empty.common, 2)] == [3, 3]


def test_pad_rows_that_the_batch_does_not_count_are_not_invented(make_step):
    step = make_step(seq_lens=(8,), query_len=3, pads=1)
    parts = split_ubatches(replace(step.common, num_actual_tokens=3), 2)
    assert [part.num_actual_tokens for part in parts] == [3, 0]


def test_a_ragged_batch_with_pad_rows_is_not_taken_for_a_padded_one(make_step):
    step = make_step(seq_lens=(8, 8), query_lens=(1, 2), pads=1)
    common = replace(step.common, num_actual_tokens=6, slot_mapping=torch.arange(6))
    parts = split_ubatches(common, 3)
    assert [part.num_actual_tokens for part in parts] == [1, 2, 3]


def test_cuts_at_rows_fall_between_blocks(make_step):
    step = make_step(seq_lens=(8, 8, 8), query_len=3, pads=1)
    parts = split_ubatches(step.common, [3, 9])
    assert [part.num_reqs for part in parts] == [1, 2, 1]
    with pytest.raises(BatchError, match="inside a request's block") as caught:
        split_ubatches(step.common, [4])
    assert caught.value.got == "row 4"
    assert caught.value.allowed == "one of [3, 6, 9]"


@pytest.mark.parametrize(
    "cuts", [0, -1, 4, [0], [9], [6, 3], [3, 3], 2.0, None], ids=repr
)
def test_cuts_that_leave_a_part_empty_are_refused(make_step, cuts):
    step = make_step(seq_lens=(8, 8, 8), query_len=3)
    with pytest.raises(BatchError, match="cannot be cut"):
        split_ubatches(step.common, cuts)


def test_decodes_stand_before_prefills(make_step):
    step = make_step(seq_lens=(9, 9, 40, 3), query_lens=(1, 2, 33, 3))
    decodes, rest = split_decodes(step.common, 2)
    assert (decodes.num_reqs, decodes.num_actual_tokens) == (2, 3)
    assert (rest.num_reqs, rest.num_actual_tokens) == (2, 36)
    assert rest.query_start_loc_cpu.tolist() == [0, 33, 36]
    assert rest.max_query_len == 33


def test_a_batch_of_one_kind_is_not_cut(make_step):
    step = make_step(seq_lens=(9, 9), query_len=2, pads=1)
    assert split_decodes(step.common, 2) == (step.common, None)
    assert split_decodes(step.common, 1) == (None, step.common)


def test_a_non_causal_batch_is_decode_altogether(make_step):
    step = make_step(seq_lens=(9, 9), query_len=8, causal=False)
    assert split_decodes(step.common, 1) == (step.common, None)


def test_a_group_of_builders_builds_one_part_each(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(9, 5, 7), query_len=2, causal=False)
    group = UbatchBuilders(plain_builder, step.problem, cpu, num_ubatches=2)
    made = group.build(step.common)
    assert [metadata.seq_lens.tolist() for metadata in made] == [[9], [5, 7]]
    assert [metadata.decode_causal for metadata in made] == [False, False]
    for metadata, builder in zip(made, group.builders, strict=True):
        assert metadata.require_current() is builder


def test_a_group_passes_its_validation_on(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(9, 5))
    group = UbatchBuilders(
        plain_builder, step.problem, cpu, num_ubatches=2, validate="device"
    )
    wrong = torch.tensor([9, -1], dtype=torch.int32)
    with pytest.raises(BatchError, match="outside its declared bound"):
        group.build(replace(step.common, seq_lens=wrong))
