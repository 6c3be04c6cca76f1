"""The merge of few pieces, its own source executed by the simulator."""

import ast
import copy
import math

import pytest
import torch
from hopper_batches import LENS, check
from hopper_simulated import (
    make_case,
    merge_pieces,
    plan_batch,
    simulate,
    simulated_merge,
)
from hopper_simulator import SimulationError, source_tree

from mla_decode_triton.hopper.grid import MERGE_SHAPES

SHAPES = [shape for shape in MERGE_SHAPES if shape.rows > 1]


@pytest.fixture(autouse=True)
def needs_gluon():
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")


def make_pieces(plan_kernel, lens, num_parts, num_rows):
    """Pieces that a work table names, and NaN where it names none.

    The last row saw no key, and the first one none of some pieces.
    """
    generator = torch.Generator().manual_seed(num_parts)
    schedule = plan_batch(plan_kernel, torch.tensor(lens, dtype=torch.int32), num_parts)
    values = torch.randn(2 * num_parts, num_rows, 512, generator=generator)
    sums = torch.randn(2 * num_parts, num_rows, generator=generator) * 9
    sums[::3, 0] = -math.inf
    sums[:, -1] = -math.inf
    values[sums.isinf()] = 0.0
    num_splits, *entries = schedule[[0, *range(8 + 4 * 16, len(schedule))]].tolist()
    used = torch.zeros(2 * num_parts, dtype=torch.bool)
    for first in range(0, 4 * num_splits, 4):
        part, before, after = (entries[first + i] for i in (1, 2, 6))
        used[
            [2 * part + 1, *range(2 * part + 2, 2 * (part + after - before) + 1, 2)]
        ] = 1
    values[~used], sums[~used] = math.nan, math.nan
    return values.flatten(), sums.flatten(), schedule


def merged(merge, lens, num_rows, values, sums, schedule, dtype=torch.float32):
    """Rows and log-sum-exps; 9 where nothing was merged."""
    out = torch.full((len(lens) * num_rows * 512,), 9.0, dtype=dtype)
    lse = torch.full((len(lens) * num_rows,), 9.0)
    merge(values, sums, out, lse, schedule, num_rows)
    return out, lse


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("lens", "num_parts", "num_rows"),
    [
        ([1024, 1024, 0, 1024, 300], 14, 15),
        ([2048], 15, 3),
        ([64, 4096, 64], 9, 1),
        ([640] * 3, 6, 8),
        ([64] * 5, 5, 6),
        ([0, 0], 3, 4),
    ],
    ids=str,
)
def test_merges_as_many_pieces_as_there_are(
    plan_kernel, shape, lens, num_parts, num_rows
):
    pieces = make_pieces(plan_kernel, lens, num_parts, num_rows)
    expected = merged(merge_pieces, lens, num_rows, *pieces)
    found = merged(simulated_merge(shape), lens, num_rows, *pieces)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    is_merged = found[1] != 9.0
    assert bool(is_merged.any()) == (max(lens) > 64)
    assert found[0].view(-1, 512)[~is_merged].eq(9.0).all()


def test_leaves_sums_alone_that_nobody_asked_for(plan_kernel):
    lens, num_rows = [640, 640], 4
    pieces = make_pieces(plan_kernel, lens, 6, num_rows)
    expected, _ = merged(merge_pieces, lens, num_rows, *pieces, dtype=torch.bfloat16)
    merge = simulated_merge(SHAPES[1], needs_lse=False)
    out, lse = merged(merge, lens, num_rows, *pieces, dtype=torch.bfloat16)
    torch.testing.assert_close(out, expected)
    assert lse.eq(9.0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_finishes_what_the_kernel_before_cut(plan_kernel, shape):
    case = make_case(
        plan_kernel,
        LENS,
        query_len=3,
        num_heads=3,
        page=64,
        causal=True,
        num_parts=5,
    )
    assert case.schedule[0] > 0
    check(simulate(case, "swap", merge=simulated_merge(shape)), case.expected)


class WithoutWait(ast.NodeTransformer):
    """Leaves one of a tree's waits out."""

    def __init__(self, index):
        self.left = index

    def visit_Expr(self, node):
        if ast.unparse(node) == "gdc_wait()":
            self.left -= 1
            if self.left == -1:
                return ast.Pass()
        return node


@pytest.mark.parametrize(
    ("index", "complaint"),
    [(0, "an access before the kernel before"), (2, "ends before the kernel before")],
)
def test_no_program_overtakes_the_kernel_before(plan_kernel, index, complaint):
    from mla_decode_triton.hopper import merge_rows

    tree = WithoutWait(index).visit(copy.deepcopy(source_tree(merge_rows)))
    merge = simulated_merge(SHAPES[0], trees={merge_rows.__name__: tree})
    lens, num_rows = [640, 0, 640], 4
    pieces = make_pieces(plan_kernel, lens, 4, num_rows)
    with pytest.raises(SimulationError, match=complaint):
        merged(merge, lens, num_rows, *pieces)


@pytest.mark.parametrize(
    ("lens", "complaint"),
    [
        ([640, 0, 640], "an access before the kernel before"),
        ([64], "ends before the kernel before"),
    ],
    ids=str,
)
def test_no_program_that_takes_turns_overtakes_it_either(plan_kernel, lens, complaint):
    from mla_decode_triton.hopper import merge_rows

    tree = WithoutWait(1).visit(copy.deepcopy(source_tree(merge_rows)))
    merge = simulated_merge(SHAPES[-1], trees={merge_rows.__name__: tree})
    pieces = make_pieces(plan_kernel, lens, 4, 4)
    with pytest.raises(SimulationError, match=complaint):
        merged(merge, lens, 4, *pieces)
