"""DCP: lengths per rank, the merge, and the whole over real gloo processes."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from mla_decode import ArgumentError, BackendRefused, Dcp, DecodeOutput, DecodeProblem
from mla_decode.dcp import DcpMerger, local_seq_lens, merge_partials, owned_tokens

RANKS = Path(__file__).with_name("ranks.py")


@pytest.mark.parametrize(
    ("seq_len", "world", "interleave", "expected"),
    [
        (10, 4, 1, [3, 3, 2, 2]),
        (17, 2, 4, [9, 8]),
        (1, 2, 1, [1, 0]),
        (0, 2, 1, [0, 0]),
        (16, 2, 16, [16, 0]),
    ],
)
def test_lengths_that_the_design_names(seq_len, world, interleave, expected):
    dcps = [Dcp(world=world, rank=r, interleave=interleave) for r in range(world)]
    assert [local_seq_lens(seq_len, dcp) for dcp in dcps] == expected
    tensors = [local_seq_lens(torch.tensor([seq_len]), dcp) for dcp in dcps]
    assert [int(tensor) for tensor in tensors] == expected


@given(
    seq_len=st.integers(0, 200), world=st.integers(1, 6), interleave=st.integers(1, 9)
)
def test_every_token_has_one_owner_and_lengths_count_them(seq_len, world, interleave):
    owned = []
    for rank in range(world):
        dcp = Dcp(world=world, rank=rank, interleave=interleave)
        mine = owned_tokens(seq_len, dcp).tolist()
        assert len(mine) == local_seq_lens(seq_len, dcp)
        owned += mine
    assert sorted(owned) == list(range(seq_len))


@given(seed=st.integers(0, 10_000), ranks=st.integers(1, 5))
def test_the_merge_equals_attention_over_all_keys(seed, ranks):
    generator = torch.Generator().manual_seed(seed)
    scores = 6 * torch.randn(ranks, 7, 2, 3, generator=generator, dtype=torch.float64)
    values = torch.randn(ranks, 7, 512, generator=generator, dtype=torch.float64)
    scores[0, :, 0] = -torch.inf  # a rank without a key of the first token
    lses = scores.logsumexp(dim=1)
    weights = torch.where(lses.isinf()[:, None], 0.0, torch.exp(scores - lses[:, None]))
    outs = torch.einsum("rkth,rkc->rthc", weights, values)
    out, lse = merge_partials(outs.float(), lses.float())
    flat = scores.flatten(0, 1)
    total = flat.logsumexp(dim=0)
    all_weights = torch.where(total.isinf(), 0.0, torch.exp(flat - total))
    truth = torch.einsum("kth,kc->thc", all_weights, values.flatten(0, 1))
    assert torch.allclose(out.double(), truth, atol=1e-5)
    assert torch.equal(lse.isinf(), total.isinf())
    finite = ~total.isinf()
    assert torch.allclose(lse.double()[finite], total[finite], atol=1e-5)


def test_a_row_without_any_key_stays_empty():
    out, lse = merge_partials(
        torch.zeros(2, 1, 1, 512), torch.full((2, 1, 1), -torch.inf)
    )
    assert not out.any()
    assert lse.item() == -torch.inf


def test_a_causal_block_under_dcp_is_refused_with_its_way_out():
    from mla_decode import MLADecoder

    problem = DecodeProblem(
        num_q_heads=4, query_lens=frozenset({3}), dcp=Dcp(world=2), max_model_len=64
    )
    with pytest.raises(BackendRefused) as refused:
        MLADecoder(problem, "reference", device="cpu")
    assert refused.value.codes == {"dcp"}
    assert "exact" in refused.value.fix


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_over_gloo_decode_to_the_single_rank_values(world, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(RANKS),
                str(rank),
                str(world),
                str(tmp_path / "store"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(printed)
    assert all("checked 24 batches" in text for text in printed), printed


@pytest.fixture
def alone(tmp_path):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_group_that_the_problem_does_not_name_is_refused():
    with pytest.raises(ArgumentError, match="no decode context"):
        DcpMerger(DecodeProblem(num_q_heads=4), device="cpu")
    with pytest.raises(ArgumentError, match="rank 0 of 1"):
        DcpMerger(DecodeProblem(num_q_heads=4, dcp=Dcp(world=2)), device="cpu")


@pytest.mark.usefixtures("alone")
def test_a_merge_without_an_lse_is_refused():
    merger = DcpMerger(DecodeProblem(num_q_heads=4, dcp=Dcp(world=1)), device="cpu")
    with pytest.raises(ArgumentError, match="no LSE"):
        merger.merge(DecodeOutput(torch.zeros(1, 4, 512), None))


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_gets_its_own_result_in_new_memory():
    problem = DecodeProblem(num_q_heads=4, dcp=Dcp(world=1), max_num_reqs=2)
    merger = DcpMerger(problem, device="cpu")
    out, lse = torch.randn(2, 4, 512).bfloat16(), torch.randn(2, 4)
    out[1, 2], lse[1, 2] = 0, -torch.inf
    kept = merger.merge(DecodeOutput(out, lse))
    merger.merge(DecodeOutput(torch.zeros_like(out), torch.zeros_like(lse)))
    assert torch.equal(kept.out, out)
    assert torch.equal(kept.lse, lse)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("tokens", "heads", "dtype", "lse_heads"),
    [
        (3, 4, torch.bfloat16, 4),
        (2, 8, torch.bfloat16, 8),
        (2, 4, torch.float32, 4),
        (2, 4, torch.bfloat16, 8),
    ],
    ids=["too many tokens", "heads", "dtype", "lse"],
)
def test_a_partial_result_of_another_problem_is_refused(
    tokens, heads, dtype, lse_heads
):
    problem = DecodeProblem(num_q_heads=4, dcp=Dcp(world=1), max_num_reqs=2)
    merger = DcpMerger(problem, device="cpu")
    out = torch.zeros(tokens, heads, 512, dtype=dtype)
    with pytest.raises(ArgumentError, match="none of the problem's"):
        merger.merge(DecodeOutput(out, torch.zeros(tokens, lse_heads)))
