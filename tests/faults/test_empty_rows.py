"""Rows without keys, scratch without values, and scores without bounds."""

import pytest
import torch
from fault_steps import SCALE, SERVERS, Step, decoder_of, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import BatchError
from mla_decode.dcp import merge_partials
from mla_decode_contract.reachable import poison_floats
from mla_decode_cuda_flashmla.simulator import sched_meta_api

EVERYWHERE = pytest.mark.parametrize("server", SERVERS)
TRITON = "interpreted Triton"


@pytest.mark.fault("EMPTY-02")
@pytest.mark.parametrize("query_len", [1, 4])
@EVERYWHERE
def test_scratch_full_of_nan_never_reaches_a_result(server, query_len):
    problem = problem_of(12, query_len, needs_lse=True)
    decoder = decoder_of(problem, SERVERS[server])
    lens = [300, 129, 64, 63, 8, 5, 4, 700]
    step = Step(problem, decoder.device, [5, 260] if server == TRITON else lens)
    for _ in range(1 if server == TRITON else 2):
        plan = decoder.plan(step.common)
        keys = step.kv_cache.clone()  # a builder may remember the engine's cache
        poisoned = poison_floats(decoder.builder)
        step.kv_cache.copy_(keys)
        step.check(step.run(decoder, plan))
    if server == TRITON:  # keeps its partial results; simulators fill theirs with NaN
        assert poisoned
        assert decoder.report().max_splits > 1


def shards(draw, ranks):
    """Partial results of one row with 2 heads; some ranks have no key."""
    outs = torch.zeros(ranks, 1, 2, 512)
    lses = torch.full((ranks, 1, 2), -torch.inf)
    for rank in range(ranks):
        for head in range(2):
            if draw(st.booleans()):
                outs[rank, 0, head] = draw(st.floats(-3, 3, width=32))
                lses[rank, 0, head] = draw(st.floats(-90, 90, width=32))
    return outs, lses


@pytest.mark.fault("EMPTY-04")
@settings(max_examples=60)
@given(data=st.data(), ranks=st.integers(1, 5))
def test_a_merge_gives_no_weight_to_who_has_no_key(data, ranks):
    outs, lses = shards(data.draw, ranks)
    out, lse = merge_partials(outs, lses)
    nobody = lses.isinf().all(dim=0)
    assert not out[nobody].any()
    assert (lse[nobody] == -torch.inf).all()
    total = lses.double().logsumexp(dim=0)
    weights = (lses.double() - total).exp().nan_to_num(0.0)
    right = (weights.unsqueeze(-1) * outs.double()).sum(dim=0)
    torch.testing.assert_close(out.double(), right, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse.double(), total, atol=1e-4, rtol=1e-6)


def bare_flashmla(step):
    """(out, lse [T, H]) as the library gives them, without the adapter."""
    requests, heads = step.q.shape[0], step.q.shape[1]
    table = step.common.block_table_tensor.clamp(min=0, max=step.kv_cache.shape[0] - 1)
    out, lse = sched_meta_api.flash_mla_with_kvcache(
        q=step.q.view(requests, 1, heads, 576),
        k_cache=step.kv_cache.nan_to_num(0.0).unsqueeze(2),
        block_table=table,
        cache_seqlens=step.common.seq_lens,
        head_dim_v=512,
        tile_scheduler_metadata=sched_meta_api.get_mla_metadata()[0],
        softmax_scale=SCALE,
    )
    return out.view(requests, heads, 512), lse.view(requests, heads)


@pytest.mark.fault("EMPTY-05")
@EVERYWHERE
def test_a_row_without_keys_is_zero_and_minus_infinity_and_merges(server):
    problem = problem_of(needs_lse=True)
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(problem, decoder.device, [0, 7])
    out, lse = step.run(decoder)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    outs, lses = torch.stack((out.float(), out.float())), torch.stack((lse, lse))
    lses[1] = -torch.inf  # the other rank holds no key of anybody
    merged, total = merge_partials(outs, lses)
    torch.testing.assert_close(merged, out.float())
    torch.testing.assert_close(total, lse)


@pytest.mark.fault("EMPTY-05")
def test_the_librarys_own_answer_would_break_a_merge():
    problem = problem_of(needs_lse=True)
    step = Step(problem, SERVERS["simulated FlashMLA"][1], [0, 7])
    out, lse = bare_flashmla(step)
    assert (lse[0] == torch.inf).all()
    outs = torch.stack((out.float(), torch.ones_like(out.float())))
    lses = torch.stack((lse, torch.zeros_like(lse)))
    merged, _ = merge_partials(outs, lses)
    assert not torch.isfinite(merged[0]).all() or (merged[0] != 1).any()


@pytest.mark.fault("EMPTY-05")
@EVERYWHERE
def test_a_causal_block_longer_than_its_sequence_is_refused(server):
    problem = problem_of(16, 4, needs_lse=True)
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(problem, decoder.device, [2])
    with pytest.raises(BatchError, match="longer than its sequence"):
        decoder.plan(step.common)
    among_others = Step(problem, decoder.device, [9, 2])  # only the device knows it
    checking = decoder_of(problem, SERVERS[server], validate="device")
    with pytest.raises(BatchError, match="longer than its sequence") as caught:
        checking.plan(among_others.common)
    assert "include this step's tokens" in caught.value.fix


@pytest.mark.fault("EMPTY-06")
@pytest.mark.parametrize("score", [1e4, 1e8, 1e12, 1e30])
@EVERYWHERE
def test_equal_scores_of_any_size_average_the_values(server, score):
    problem = problem_of(needs_lse=True)
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(problem, decoder.device, [64])
    each = (score / 64) ** 0.5
    step.q[..., :512] = 0.0
    step.q[..., 512:] = each
    step.kv_cache[..., 512:] = each
    out, lse = step.run(decoder)
    page = step.common.block_table_tensor[0, 0].item()
    values = step.kv_cache[page, :, :512].double()
    assert torch.isfinite(out).all()
    assert (out.double() <= values.amax(dim=0) + 0.01).all()
    assert (out.double() >= values.amin(dim=0) - 0.01).all()
    torch.testing.assert_close(lse.double(), step.truth()[1], atol=1e-3, rtol=1e-5)
    if score <= 1e4 or server != "simulated AITER":  # whose 64 keys lie in splits
        average = values.mean(dim=0).expand(1, 16, 512)
        torch.testing.assert_close(out.double(), average, atol=2e-3, rtol=8e-3)
