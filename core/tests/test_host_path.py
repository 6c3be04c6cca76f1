"""What a build and a forward ask of torch: operators counted, so that none creeps in.

Each operator, a view too, is one to five microseconds of a host that feeds a GPU.
"""

from dataclasses import replace

import pytest
import torch

from mla_decode import Dcp


@pytest.fixture
def warm(make_step, plain_builder, cpu):
    """A function from step fields to (builder, step), after a build of that shape."""

    def make(**fields):
        step = make_step(seq_lens=(9, 40), query_len=2, max_model_len=64, **fields)
        table = step.common.block_table_tensor
        assert table.shape[0] == 2
        step = step.with_common(
            block_table_tensor=table[:, : step.problem.table_width].clone()
        )
        builder = plain_builder(step.problem, cpu)
        builder.build(step.common)
        return builder, step

    return make


def test_a_build_compares_its_block_starts_and_nothing_else(operators, warm):
    builder, step = warm()
    assert operators(lambda: builder.build(step.common)) == ["equal"]


def test_a_build_under_graphs_adds_one_copy_of_all(operators, warm):
    builder, step = warm(graphs=True)
    assert operators(lambda: builder.build(step.common)) == ["equal", "_foreach_copy_"]


def test_a_build_under_dcp_copies_the_totals_with_the_rest(
    operators, make_step, plain_builder, cpu
):
    step = make_step(seq_lens=(9, 5), graphs=True, dcp=Dcp(world=2))
    builder = plain_builder(step.problem, cpu)
    local = torch.tensor([5, 3], dtype=torch.int32)
    table = step.common.block_table_tensor[:, : step.problem.table_width].clone()
    common = replace(step.common, dcp_local_seq_lens=local, block_table_tensor=table)
    builder.build(common)
    assert operators(lambda: builder.build(common)) == ["equal", "_foreach_copy_"]


def test_a_table_of_more_rows_or_columns_than_the_buffer_is_cut_once_each(
    operators,
    warm,
):
    builder, step = warm(graphs=True)
    table = torch.zeros(7, 100, dtype=torch.int32)
    table[:2, : step.common.block_table_tensor.shape[1]] = (
        step.common.block_table_tensor
    )
    common = replace(step.common, block_table_tensor=table)
    builder.build(common)
    found = operators(lambda: builder.build(common))
    assert [name for name in found if name not in {"slice", "alias"}] == [
        "equal",
        "_foreach_copy_",
    ]
    width = step.problem.table_width
    assert torch.equal(builder.build(common).block_table, table[:2, :width])


@pytest.mark.parametrize(
    ("needs_lse", "passes", "names"),
    [
        (False, False, ["empty", "fill_"]),
        (True, False, ["empty", "fill_", "empty", "fill_"]),
        (True, True, ["fill_", "fill_"]),
    ],
)
def test_a_forward_makes_the_outputs_that_are_missing_and_nothing_else(
    operators, warm, plain_backend, needs_lse, passes, names
):
    builder, step = warm(needs_lse=needs_lse)
    metadata = builder.build(step.common)
    outputs = {}
    if passes:
        outputs = {
            "out": torch.zeros(4, 2, 512, dtype=torch.bfloat16),
            "lse": torch.zeros(4, 2),
        }

    def forward():
        return plain_backend.forward(
            step.q, step.kv_cache, metadata, **step.arguments, **outputs
        )

    forward()
    assert operators(forward) == names


def test_a_library_that_brings_its_outputs_costs_no_allocation(
    operators, warm, plain_backend_cls
):
    builder, step = warm(needs_lse=True)
    mine = torch.ones(4, 2, 512, dtype=torch.bfloat16), torch.ones(4, 2)

    def bring(self, call):
        del self
        assert call.callers_out is call.callers_lse is None
        call.out, call.lse = mine

    backend = type("Bringing", (plain_backend_cls,), {"_forward": bring})()
    metadata = builder.build(step.common)

    def forward():
        return backend.forward(step.q, step.kv_cache, metadata, **step.arguments)

    found = forward()
    assert (found.out, found.lse) == mine
    assert operators(forward) == []
