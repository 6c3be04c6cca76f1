"""The host side, as far as it goes without a GPU."""

import pytest
import torch

from mla_decode.errors import ArgumentError

pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")

from mla_decode_triton.hopper import variants
from mla_decode_triton.hopper.boxes import box_cache
from mla_decode_triton.hopper.grid import (
    MERGE_SHAPES,
    MergeShape,
    WorkspaceSize,
    choose_grid,
    choose_merge,
    choose_rows,
)
from mla_decode_triton.hopper.launch import HopperStep


@pytest.mark.parametrize(
    ("num_rows", "rows", "row_tiles", "parts"),
    [
        (1, 16, 1, 132),
        (16, 16, 1, 132),
        (17, 32, 1, 132),
        (33, 64, 1, 132),
        (128, 64, 2, 66),
        (150, 64, 3, 44),
        (4096, 64, 64, 2),
        (64 * 200, 64, 200, 1),
    ],
)
def test_row_tiles_share_the_device(num_rows, rows, row_tiles, parts):
    grid = choose_grid(num_rows, 132)
    assert (grid.rows, grid.row_tiles, grid.parts) == (rows, row_tiles, parts)
    assert grid.swapped == (num_rows <= 32)


@pytest.mark.parametrize(
    ("num_rows", "num_reqs", "max_seq_len", "rows"),
    [
        (1, 64, 32768, 16),
        # A program has five tiles of 64 tokens, or it has one more.
        (32, 16, 20 * 64, 16),
        (32, 16, 20 * 64 + 1, 32),
        (512, 4, 5 * 64, 16),
        (512, 4, 5 * 64 + 1, 64),
        (4096, 2, 64, 16),
        (4096, 3, 64, 64),
        # Eight, where 64 rows leave 16 pieces of a request to merge.
        (128, 1, 132 * 64, 16),
        (128, 4, 33 * 64, 16),
        (128, 4, 33 * 64 + 1, 64),
        (128, 5, 26 * 64, 64),
        (128, 1, 0, 16),
    ],
)
def test_few_keys_are_shared_by_programs_of_few_rows(
    num_rows, num_reqs, max_seq_len, rows
):
    assert choose_rows(num_rows, num_reqs, max_seq_len, 132) == rows
    grid = choose_grid(num_rows, 132, rows)
    assert (grid.rows, grid.row_tiles) == (rows, -(-num_rows // rows))
    assert grid.parts == max(1, 132 // grid.row_tiles)


@pytest.mark.parametrize("num_rows", [17, 40, 64, 128, 4096])
@pytest.mark.parametrize("multiprocessors", [1, 78, 132])
def test_programs_of_few_rows_need_no_more_memory(num_rows, multiprocessors):
    size = WorkspaceSize.of([num_rows], 64, multiprocessors)
    grid = choose_grid(num_rows, multiprocessors, 16)
    assert grid.partial_rows(num_rows) <= size.partial_rows
    assert grid.schedule_entries <= size.schedule_entries
    assert grid.scratch_entries(64) <= size.scratch_entries


def make_step(query_len, num_heads, max_num_reqs=64):
    return HopperStep.alone(
        max_num_reqs=max_num_reqs,
        query_len=query_len,
        num_heads=num_heads,
        device=torch.device("cpu"),
        multiprocessors=132,
    )


@pytest.mark.parametrize(
    ("parts", "num_reqs", "rows", "pieces"),
    [
        (132, 0, 1, 64),
        (132, 1, 1, 64),
        (132, 8, 1, 16),
        (132, 16, 4, 8),
        (66, 16, 4, 4),
        (132, 64, 4, 2),
        # Not cut into pieces of one size, or not at all.
        (132, 50, 4, 4),
        (132, 28, 4, 8),
        (132, 67, 4, 4),
        # Not cut at all.
        (132, 119, 4, 4),
        (132, 1024, 4, 4),
    ],
)
def test_the_merge_holds_the_pieces_of_even_requests(parts, num_reqs, rows, pieces):
    shape = choose_merge(parts, num_reqs)
    assert shape in MERGE_SHAPES
    assert (shape.rows, shape.pieces) == (rows, pieces)


@pytest.mark.parametrize(
    ("parts", "num_reqs", "max_seq_len", "rows", "pieces"),
    [
        (132, 1, 0, 4, 2),
        (132, 1, 2 * 64, 4, 2),
        (132, 1, 8 * 64, 4, 8),
        (132, 1, 8 * 64 + 1, 1, 16),
        (132, 1, 16 * 64 + 1, 1, 64),
        (132, 1, 1 << 20, 1, 64),
        (132, 16, 64, 4, 2),
        (132, 64, 1 << 20, 4, 2),
    ],
)
def test_the_merge_holds_no_more_pieces_than_there_are_tiles(
    parts, num_reqs, max_seq_len, rows, pieces
):
    shape = choose_merge(parts, num_reqs, max_seq_len)
    assert shape in MERGE_SHAPES
    assert (shape.rows, shape.pieces) == (rows, pieces)


class Grids:
    """A kernel that keeps the grids that it is asked for, and runs nothing."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        self.seen.append(grid)
        return lambda *_, **__: None


@pytest.mark.parametrize(
    ("num_heads", "num_reqs", "expected"),
    [(7, 64, 64 * 2), (7, 33, 33 * 2 * 2), (64, 64, 64 * 16), (7, 400, 132 * 4)],
)
def test_a_program_merges_a_warp_a_row_where_pieces_are_few(
    monkeypatch, num_heads, num_reqs, expected
):
    grids = Grids()
    monkeypatch.setattr(variants, "merge_rows_kernel", grids)
    step = make_step(1, num_heads)
    shape = choose_merge(step.grid.parts, num_reqs)
    step.merge(torch.zeros(1, dtype=torch.bfloat16), None, shape, num_reqs)
    assert grids.seen == [(expected, 1, 1)]


def test_many_pieces_are_merged_by_as_many_programs_as_fit(monkeypatch):
    grids = Grids()
    monkeypatch.setattr(variants, "merge_kernel", grids)
    for num_heads in (7, 128 * 32):
        step = make_step(1, num_heads)
        shape = MergeShape(rows=1, pieces=64, columns=64, programs=16)
        step.merge(torch.zeros(1, dtype=torch.bfloat16), None, shape, 1)
    assert grids.seen == [(7 * 8, 1, 1), (16 * 132, 1, 1)]


@pytest.mark.parametrize("max_num_reqs", [1, 1024])
def test_the_workspace_does_not_grow_with_the_batch(max_num_reqs):
    step = make_step(4, 16, max_num_reqs)
    assert step.workspace.partial_out.shape == (2 * 132 * 64, 512)
    assert step.workspace.partial_lse.shape == (2 * 132 * 64,)


def forward(step, q, cache, **options):
    lens = torch.zeros(2, dtype=torch.int32)
    out = torch.zeros(q.shape[0], q.shape[1], 512, dtype=q.dtype)
    step.forward(
        q[..., :512],
        q[..., 512:],
        cache,
        torch.zeros(2, 4, dtype=torch.int32),
        lens,
        out,
        None,
        softmax_scale=1.0,
        causal=True,
        **options,
    )


@pytest.mark.parametrize(
    ("dtype", "page", "query_len", "scale", "complaint"),
    [
        (torch.bfloat16, 8, 1, None, "pages of 8"),
        (torch.float32, 64, 1, None, "float32"),
        (torch.float8_e4m3fn, 64, 1, None, "kv_scale not given"),
        (torch.uint8, 16, 4, None, "kv_scale not given"),
        (torch.bfloat16, 64, 1, torch.ones(1), "kv_scale given"),
    ],
)
def test_refuses_caches_that_no_variant_reads(dtype, page, query_len, scale, complaint):
    q = torch.zeros(2 * query_len, 16, 576, dtype=torch.bfloat16)
    cache = torch.zeros(3, page, 576, dtype=dtype)
    with pytest.raises(ArgumentError, match=complaint):
        forward(make_step(query_len, 16), q, cache, kv_scale=scale)


@pytest.mark.parametrize(("first", "stride"), [(0, 64 * 576 + 8), (8, 64 * 576)])
def test_refuses_an_fp8_cache_that_is_not_read_in_16_bytes(first, stride):
    q = torch.zeros(8, 16, 576, dtype=torch.bfloat16)
    memory = torch.zeros(first + 3 * stride, dtype=torch.uint8)
    cache = memory[first:].as_strided((3, 64, 576), (stride, 576, 1))
    with pytest.raises(ArgumentError, match="16 bytes at a time"):
        forward(make_step(4, 16), q, cache, kv_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("first", "pages", "stride"),
    [(0, 3, 64 * 576 + 4), (1, 3, 64 * 576), (0, 0, 64 * 576)],
)
def test_refuses_a_cache_that_is_not_read_in_16_bytes(first, pages, stride):
    q = torch.zeros(2, 16, 576, dtype=torch.bfloat16)
    memory = torch.zeros(first + 3 * stride, dtype=torch.bfloat16)
    cache = memory[first:].as_strided((pages, 64, 576), (stride, 576, 1))
    with pytest.raises(ArgumentError, match="16 bytes at a time"):
        forward(make_step(1, 16), q, cache)


def test_a_single_page_has_no_stride():
    cache = torch.zeros(64 * 576 + 5, dtype=torch.bfloat16)
    cache = cache[: 64 * 576].as_strided((1, 64, 576), (64 * 576 + 5, 576, 1))
    assert box_cache(cache).strides == (64 * 576, 576, 1)


def test_refuses_queries_whose_rows_lie_apart():
    q = torch.zeros(4, 2, 16, 576, dtype=torch.bfloat16)[:, 0]
    cache = torch.zeros(3, 64, 576, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="join the query"):
        forward(make_step(2, 16), q, cache)
