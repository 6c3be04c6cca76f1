"""How steps are cut, over every architecture."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_decode import DecodeProblem, DeviceInfo, Mask
from mla_decode_triton import chosen_backend
from mla_decode_triton.planning import (
    MAX_SPLITS,
    MERGE_SIZES,
    _most_splits,
    plan_step,
    workspace_bytes,
    workspace_rows,
)
from mla_decode_triton.tiles import ARCH_TILES

backend = chosen_backend("portable")
SM_90 = ARCH_TILES["sm_90"]


def problem_of(heads, query_len, *, max_num_reqs=64, max_model_len=16384):
    return DecodeProblem(
        num_q_heads=heads,
        query_lens=frozenset({query_len}),
        max_num_reqs=max_num_reqs,
        max_model_len=max_model_len,
    )


@given(
    arch=st.sampled_from(sorted(ARCH_TILES)),
    heads=st.integers(1, 128),
    query_len=st.integers(1, 32),
    num_reqs=st.integers(1, 64),
    max_seq_len=st.integers(1, 16384),
)
def test_no_step_outgrows_the_workspace(arch, heads, query_len, num_reqs, max_seq_len):
    tiles, problem = ARCH_TILES[arch], problem_of(heads, query_len)
    plan = plan_step(
        problem,
        tiles,
        num_reqs=num_reqs,
        query_len=query_len,
        max_seq_len=max_seq_len,
    )
    assert plan.partial_rows <= workspace_rows(problem, tiles)
    assert workspace_bytes(problem, tiles) == workspace_rows(problem, tiles) * 513 * 4


@given(
    num_reqs=st.integers(1, 256),
    max_seq_len=st.integers(1, 1 << 20),
    heads=st.sampled_from([1, 16, 20, 128]),
)
def test_every_tile_of_keys_is_in_one_split(num_reqs, max_seq_len, heads):
    plan = plan_step(
        problem_of(heads, 1),
        SM_90,
        num_reqs=num_reqs,
        query_len=1,
        max_seq_len=max_seq_len,
    )
    steps = -(-max_seq_len // plan.tile.tokens)
    share = -(-steps // plan.num_splits)
    assert 1 <= plan.num_splits <= min(MAX_SPLITS, max(steps, 1))
    assert share * plan.num_splits >= steps
    assert plan.row_tiles * plan.tile.rows >= plan.num_rows
    assert plan.merge_size in MERGE_SIZES
    assert plan.merge_size >= plan.num_splits


@pytest.mark.parametrize(
    ("heads", "query_len", "num_reqs", "seq_len", "splits"),
    [
        # The best measured on an H200, among 1 to 128.
        (16, 1, 16, 16384, 16),
        (16, 1, 128, 4096, 2),
        (16, 4, 16, 16384, 8),
        (16, 8, 64, 16384, 1),
        (128, 1, 16, 4096, 4),
        (128, 4, 16, 16384, 1),
        (128, 8, 64, 4096, 1),
    ],
)
def test_fills_the_device_once(heads, query_len, num_reqs, seq_len, splits):
    plan = plan_step(
        problem_of(heads, query_len),
        SM_90,
        num_reqs=num_reqs,
        query_len=query_len,
        max_seq_len=seq_len,
    )
    assert plan.num_splits == splits


def test_a_lone_request_is_spread_over_the_device():
    plan = plan_step(
        problem_of(16, 1), SM_90, num_reqs=1, query_len=1, max_seq_len=4096
    )
    assert plan.num_splits == 64
    assert plan.row_tiles == 1


def test_a_block_is_walked_once_where_its_rows_fit_a_tile():
    plan = plan_step(problem_of(8, 8), SM_90, num_reqs=4, query_len=8, max_seq_len=4096)
    assert plan.row_tiles == 1


def test_an_empty_batch_has_a_plan():
    plan = plan_step(problem_of(16, 1), SM_90, num_reqs=0, query_len=1, max_seq_len=1)
    assert plan.grid == (1, 1, 0)


@given(
    arch=st.sampled_from(sorted(ARCH_TILES)),
    heads=st.sampled_from((1, 8, 16, 48, 128)),
    query_len=st.integers(1, 32),
    max_num_reqs=st.integers(1, 700),
    max_model_len=st.sampled_from((32, 64, 1000, 131072)),
    max_splits=st.sampled_from((None, 1, 3, 64)),
)
def test_the_workspace_holds_the_largest_batch_of_every_size(
    arch, heads, query_len, max_num_reqs, max_model_len, max_splits
):
    """Counted batch by batch; the planner skips those that are cut alike."""
    problem = DecodeProblem(
        num_q_heads=heads,
        query_lens={query_len},
        masks={Mask.NON_CAUSAL},
        max_num_reqs=max_num_reqs,
        max_model_len=max_model_len,
        max_splits=max_splits,
    )
    tiles = ARCH_TILES[arch]
    rows = query_len * heads
    tile = tiles.tile(rows, "bf16")
    most = 0
    for num_reqs in range(1, max_num_reqs + 1):
        splits = _most_splits(
            programs=num_reqs * -(-rows // tile.rows),
            capacity=tiles.num_units * tile.residents,
            steps=-(-max_model_len // tile.tokens),
            cap=min(MAX_SPLITS, max_splits or MAX_SPLITS),
        )
        most = max(most, num_reqs * rows * splits if splits > 1 else 0)
    assert workspace_rows(problem, tiles) == most


@given(
    arch=st.sampled_from(sorted(ARCH_TILES)),
    heads=st.integers(1, 128),
    query_len=st.integers(1, 32),
    kv_dtype=st.sampled_from(("bf16", "fp8")),
    batch_invariant=st.booleans(),
)
def test_no_block_walks_less_than_its_bound(
    arch, heads, query_len, kv_dtype, batch_invariant
):
    problem = DecodeProblem(
        num_q_heads=heads,
        kv_dtype=kv_dtype,
        query_lens={query_len},
        max_num_reqs=8,
        batch_invariant=batch_invariant,
    )
    device = DeviceInfo.assume(arch)
    if not backend.refusals(problem, device):
        bound = backend.answers(device).fewest_walks(
            problem, query_len, Mask.CAUSAL, heads
        )
        assert 1 <= bound <= backend.cost(problem, device).kv_walks


def test_an_unknown_arch_walks_nothing():
    answers = backend.answers(DeviceInfo.assume("sm_70"))
    problem = DecodeProblem(num_q_heads=16)
    assert answers.fewest_walks(problem, 1, Mask.CAUSAL, 16) is None
    assert answers.refusals(problem)
