"""The clause STABLE: what a captured graph reads keeps its address."""

from dataclasses import replace

import pytest
import torch

from mla_decode import BackendRefused, Dcp, GraphSupport, QueryLenSupport


def addresses(metadata):
    tensors = (
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        metadata.dcp_tot_seq_lens,
    )
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def test_a_later_build_of_the_same_shape_writes_to_the_recorded_addresses(
    make_step, plain_builder, cpu
):
    first = make_step(seq_lens=(9, 40), query_len=2, graphs=True, max_model_len=64)
    later = make_step(seq_lens=(33, 2), query_len=2, seed=1)
    builder = plain_builder(first.problem, cpu)
    captured = builder.build_for_capture(first.common)
    recorded = addresses(captured)
    replayed = builder.build(later.common)
    assert addresses(replayed) == recorded
    assert captured.seq_lens.tolist() == [33, 2]
    table = later.common.block_table_tensor[:, :3]
    assert torch.equal(captured.block_table[:, :3], table)


def test_launch_shapes_depend_on_nothing_of_the_step(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(9, 40), query_len=2, graphs=True, max_model_len=640)
    short = step.with_common(
        max_seq_len=20, block_table_tensor=step.common.block_table_tensor[:, :2]
    )
    builder = plain_builder(step.problem, cpu)
    for common in (step.common, short.common):
        metadata = builder.build_for_capture(common)
        assert metadata.max_seq_len == 640
        assert metadata.block_table.shape == (2, 40)


def test_totals_are_stable_under_dcp(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(9, 5), graphs=True, dcp=Dcp(world=2))
    builder = plain_builder(step.problem, cpu)
    local = torch.tensor([5, 3], dtype=torch.int32)
    common = replace(step.common, dcp_local_seq_lens=local)
    metadata = builder.build_for_capture(common)
    assert metadata.dcp_tot_seq_lens.tolist() == [9, 5]
    recorded = addresses(metadata)
    assert addresses(builder.build(replace(common, seq_lens=local + 1))) == recorded
    assert metadata.dcp_tot_seq_lens.tolist() == [6, 4]


def test_ragged_starts_are_stable_where_ragged_batches_are_captured(
    make_step, plain_builder, cpu
):
    always = type(
        "A",
        (plain_builder,),
        {
            "graph_support": GraphSupport.ALWAYS,
            "query_len_support": QueryLenSupport.VARLEN,
        },
    )
    step = make_step(seq_lens=(9, 9), query_lens=(4, 1), graphs=True)
    builder = always(step.problem, cpu)
    metadata = builder.build_for_capture(step.common)
    recorded = addresses(metadata)
    starts = torch.tensor([0, 1, 5], dtype=torch.int32)
    other = replace(step.common, query_start_loc=starts, query_start_loc_cpu=starts)
    assert addresses(builder.build(other)) == recorded
    assert metadata.query_start_loc.tolist() == [0, 1, 5]


def test_a_ragged_batch_is_not_captured_where_only_uniform_ones_are(
    make_step, plain_builder, cpu
):
    varlen = type("V", (plain_builder,), {"query_len_support": QueryLenSupport.VARLEN})
    step = make_step(seq_lens=(9, 9), query_lens=(4, 1), graphs=True)
    builder = varlen(step.problem, cpu)
    kept = builder.build(step.common)
    with pytest.raises(BackendRefused) as caught:
        builder.build_for_capture(step.common)
    assert "[4, 1]" in caught.value.refusals[0].got
    assert kept.require_current() is builder


def test_capture_without_graphs_in_the_problem_is_refused(
    make_step, plain_builder, cpu
):
    step = make_step()
    with pytest.raises(BackendRefused, match="names no graphs"):
        plain_builder(step.problem, cpu).build_for_capture(step.common)


def test_without_graphs_nothing_is_copied(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(9, 9))
    metadata = plain_builder(step.problem, cpu).build(step.common)
    assert metadata.seq_lens is step.common.seq_lens
    assert metadata.block_table is step.common.block_table_tensor
    assert metadata.max_seq_len == 9
