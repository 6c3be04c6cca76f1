"""Decode context parallelism: whose keys, whose lengths, and who can serve them."""

from dataclasses import replace

import pytest
import torch
from fault_steps import (
    CPU,
    SERVERS,
    Step,
    amd,
    decoder_of,
    problem_of,
    refusals,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import (
    BatchError,
    Capability,
    Dcp,
    Feature,
    Support,
    survey,
)
from mla_decode.dcp import local_seq_lens, merge_partials, owned_tokens
from mla_decode.reference import ReferenceBackend


def shares(seq_len, world, interleave=1):
    return [
        local_seq_lens(seq_len, Dcp(world=world, rank=rank, interleave=interleave))
        for rank in range(world)
    ]


@pytest.mark.fault("DCP-01")
def test_each_token_of_a_verify_block_has_its_own_share():
    assert shares(10, 4) == [3, 3, 2, 2]
    assert [shares(7 + token, 4) for token in (1, 2, 3)] == [
        [2, 2, 2, 2],
        [3, 2, 2, 2],
        [3, 3, 2, 2],
    ]
    assert shares(17, 2, 4) == [9, 8]


def rank_step(problem, whole, dcp):
    """What a rank of the group holds of a whole step: its keys, table and lengths."""
    size = problem.page_size
    lens = whole.common.seq_lens.tolist()
    local = [local_seq_lens(length, dcp) for length in lens]
    own = problem_of(
        problem.num_q_heads,
        problem.max_query_len,
        causal=whole.causal,
        page_size=size,
        dcp=dcp,
    )
    step = Step(own, CPU, [max(n, 1) for n in local])
    table = whole.common.block_table_tensor
    for request, length in enumerate(lens):
        pages = table[request, : -(-length // size)].long()
        keys = whole.kv_cache[pages].reshape(-1, 576)[owned_tokens(length, dcp)]
        for at, key in enumerate(keys):
            page = step.common.block_table_tensor[request, at // size]
            step.kv_cache[int(page), at % size] = key
    step.q = whole.q
    return own, step.changed(
        seq_lens=whole.common.seq_lens,
        max_seq_len=max(lens),
        block_table_tensor=torch.nn.functional.pad(
            step.common.block_table_tensor, (0, table.shape[1]), value=-1
        ),
        query_start_loc=whole.common.query_start_loc,
        query_start_loc_cpu=whole.common.query_start_loc_cpu,
        causal=whole.causal,
        dcp_local_seq_lens=torch.tensor(local, dtype=torch.int32),
    )


@pytest.mark.fault("DCP-01")
@settings(max_examples=25)
@given(
    world=st.integers(1, 4),
    interleave=st.sampled_from([1, 3, 16]),
    lens=st.lists(st.integers(3, 40), min_size=1, max_size=3),
    causal=st.booleans(),
)
def test_the_merged_ranks_are_one_rank(world, interleave, lens, causal):
    problem = problem_of(2, 3, causal=causal, page_size=16, needs_lse=True)
    whole = Step(problem, CPU, lens, causal=causal)
    partials = []
    for rank in range(world):
        dcp = Dcp(world=world, rank=rank, interleave=interleave)
        own, step = rank_step(problem, whole, dcp)
        decoder = decoder_of(own, SERVERS["reference"], "exact")
        partials.append(step.run(decoder))
    out, lse = merge_partials(
        torch.stack([partial.out for partial in partials]),
        torch.stack([partial.lse for partial in partials]),
    )
    truth, true_lse = whole.truth()
    torch.testing.assert_close(out.double(), truth, atol=0.01, rtol=0.01)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-4, rtol=1e-4)


class WithoutDcp(ReferenceBackend):
    """A backend that serves everything else."""

    name = "without_dcp"
    capability = Capability(
        rows=tuple(
            replace(
                row, features={**row.features, Feature.DCP: Support.NOT_IMPLEMENTED}
            )
            for row in ReferenceBackend.capability.rows
        )
    )


@pytest.mark.fault("DCP-03")
@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp8 fp8", "bf16 fp8"])
def test_a_backend_without_dcp_is_refused_by_that_name(dtypes):
    server = (WithoutDcp(), CPU)
    decoder_of(problem_of(dtypes=dtypes), server)
    reasons = refusals(problem_of(dtypes=dtypes, dcp=Dcp(world=2)), server)
    assert [str(reason.code) for reason in reasons] == ["dcp"]
    assert "dcp" in reasons[0].got
    assert reasons[0].fix


@pytest.mark.fault("DCP-04")
def test_lengths_and_table_of_different_spaces_are_refused():
    problem = problem_of(2, page_size=16, dcp=Dcp(world=2))
    decoder = decoder_of(problem, SERVERS["reference"], validate="device")
    step = Step(problem, CPU, [20])  # a rank's share of 40 keys: 2 pages of 16
    table = step.common.block_table_tensor[:, :2].contiguous()
    local, whole = (torch.tensor([n], dtype=torch.int32) for n in (20, 40))
    right = step.changed(
        seq_lens=whole,
        max_seq_len=40,
        block_table_tensor=torch.nn.functional.pad(table, (0, 1), value=-1),
        dcp_local_seq_lens=local,
    )
    right.run(decoder)
    with pytest.raises(BatchError, match="block_table") as caught:
        decoder.plan(right.changed(block_table_tensor=table).common)
    assert ">= 3" in caught.value.allowed
    with pytest.raises(BatchError, match="dcp_local_seq_lens"):
        decoder.plan(right.changed(dcp_local_seq_lens=None).common)
    with pytest.raises(BatchError, match="more keys than the request") as caught:
        decoder.plan(right.changed(dcp_local_seq_lens=whole + 1).common)
    assert "this rank's in dcp_local_seq_lens" in caught.value.fix
    plain = decoder_of(problem_of(2, page_size=16), SERVERS["reference"])
    with pytest.raises(BatchError, match="names no group"):
        plain.plan(right.common)


@pytest.mark.fault("DCP-06")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp8 fp8", "bf16 fp8"])
@pytest.mark.parametrize("release", ["0.1.16.post6", "0.1.20.post1"])
def test_a_schedule_dropped_for_the_lse_that_dcp_needs_is_reported(
    arch, dtypes, release
):
    device = amd(arch, release)
    served = 0
    for heads in (8, 16, 32, 64, 128):
        problem = problem_of(heads, dtypes=dtypes, dcp=Dcp(world=2))
        assert problem.needs_lse
        found = survey(problem, device, "rocm_aiter")
        if found.selection is None:
            codes = {str(reason.code) for reason in found.refused["rocm_aiter"]}
            assert "lse" in codes
            assert all(reason.fix for reason in found.refused["rocm_aiter"])
            continue
        served += 1
        decoder = decoder_of(problem, ("rocm_aiter", device))
        step = Step(problem, device, [30, 5])
        half = step.common.seq_lens
        step = step.changed(seq_lens=half * 2, max_seq_len=60, dcp_local_seq_lens=half)
        plan = decoder.plan(step.common)
        step.changed(seq_lens=half).check(step.run(decoder, plan))
        (launch,) = decoder.builder.library.machine.launches
        assert launch.key == plan.route.key
        assert decoder.report().kernels == (launch.kernel,)
        dropped = [reason for d in decoder.report().downgrades for reason in d.reasons]
        assert bool(dropped) is not plan.route.keeps_schedule
        assert all(reason.startswith("[lse]") for reason in dropped)
    if dtypes == "bf16 fp8":
        assert served == 0
    elif arch == "gfx950":
        assert served == 5
