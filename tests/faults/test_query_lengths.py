"""Faults of block lengths: broadcast rows, aborts, stray writes, odd offsets."""

import pytest
import torch
from fault_steps import (
    CPU,
    HOPPER,
    SCALE,
    SERVERS,
    Step,
    amd,
    decoder_of,
    problem_of,
    refusals,
    serve,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mla_decode import (
    BackendRefused,
    BatchError,
    MaskError,
    MLADecoder,
    OutdatedLibraryError,
    QueryLenSupport,
    StaleMetadataError,
)
from mla_decode_rocm_aiter import backend
from mla_decode_rocm_aiter.simulator import simulated

FENCE = 4096


@pytest.mark.fault("QLEN-01")
@pytest.mark.parametrize("name", SERVERS)
def test_each_row_of_a_block_is_the_truth_of_its_own_keys(name):
    for q in (3, 5, 8) if name == "interpreted Triton" else range(1, 9):
        _, _, found = serve(problem_of(4, q), SERVERS[name], [40, 9])
        rows = found.out.float().view(2, q, -1)
        for at in range(1, q):
            assert not torch.allclose(rows[:, at], rows[:, 0], atol=0.02)


@pytest.mark.fault("QLEN-01")
def test_lengths_that_would_be_broadcast_are_refused_or_lowered():
    server = ("rocm_aiter", amd("gfx942"))
    for q in (5, 6, 7):
        (reason,) = refusals(problem_of(16, q), server)
        assert str(reason.code) == "query_len"
        assert f"{q} tokens" in reason.got
        assert "exact" in reason.fix
    for q in range(1, 9):
        serve(problem_of(16, q), server, [40, 9], lowering="exact")


@pytest.mark.fault("QLEN-03")
@settings(max_examples=40)
@given(
    heads=st.integers(1, 128),
    q=st.integers(1, 17),
    causal=st.booleans(),
    dtypes=st.sampled_from(["bf16 bf16", "bf16 fp8", "fp8 fp8"]),
    needs_lse=st.booleans(),
    arch=st.sampled_from(["gfx942", "gfx950"]),
    release=st.sampled_from(["0.1.16.post6", "0.1.19.post2", "0.1.20.post1"]),
)
def test_a_block_is_refused_before_the_library_or_served_right(
    heads, q, causal, dtypes, needs_lse, arch, release
):
    problem = problem_of(
        heads, q, causal=causal, dtypes=dtypes, needs_lse=needs_lse, max_model_len=256
    )
    server = ("rocm_aiter", amd(arch, release))
    with simulated(arch, release, abort="native", cus=8) as machine:
        if backend.refusals(problem, server[1]):
            with pytest.raises((BackendRefused, OutdatedLibraryError)) as caught:
                decoder_of(problem, server)
            assert caught.value.got
            assert caught.value.fix
            assert not machine.launches
            return
        decoder = decoder_of(problem, server)
        assume(heads * q <= 256)
        step = Step(problem, server[1], [40, q], causal=causal)
        step.check(step.run(decoder))


@pytest.mark.fault("QLEN-03")
def test_five_tokens_of_the_mixed_pair_are_refused_and_three_served():
    server = ("rocm_aiter", amd())
    for causal in (True, False):
        problem = problem_of(16, 5, causal=causal, dtypes="bf16 fp8")
        (reason,) = refusals(problem, server)
        assert str(reason.code) == "query_len"
        assert "5 tokens" in reason.got
    serve(problem_of(16, 3, dtypes="bf16 fp8"), server, [10, 30])
    (reason,) = refusals(problem_of(16, 3, causal=False, dtypes="bf16 fp8"), server)
    assert str(reason.code) == "mask"


@pytest.mark.fault("QLEN-05")
def test_a_block_past_the_scheduler_is_refused_and_the_next_step_served():
    server = ("cuda_flashmla", HOPPER)
    (reason,) = refusals(problem_of(16, 1024, max_model_len=2048), server)
    assert str(reason.code) == "query_len"
    assert (reason.got, "1..528" in reason.allowed) == ("1024", True)
    decoder, step, _ = serve(problem_of(16, 4), server, [256])
    with_kv_heads = step.kv_cache.unsqueeze(2).expand(-1, -1, 8, -1)
    plan = decoder.plan(step.common)
    with pytest.raises(StaleMetadataError, match=r"\[pages, 64, 576\]"):
        decoder.run(step.q, with_kv_heads, plan, softmax_scale=SCALE)
    step.check(step.run(decoder))


def fenced(like):
    """A buffer of NaN inside a larger one, whose other elements are canaries."""
    room = torch.full((like.numel() + 2 * FENCE,), 123.0, dtype=like.dtype)
    inside = room[FENCE:-FENCE].view(like.shape).fill_(torch.nan)
    return inside, room


@pytest.mark.fault("QLEN-06")
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("pads", [0, 2])
def test_nothing_is_written_past_the_output(name, pads):
    problem = problem_of(4, {4, 2}, needs_lse=True)
    decoder = decoder_of(problem, SERVERS[name])
    ragged = Step(problem, decoder.device, [40, 9, 100], blocks=[4, 4, 2], pads=pads)
    steps = [Step(problem, decoder.device, [40, 9, 100], blocks=[4] * 3, pads=pads)]
    if decoder.builder.query_len_support is QueryLenSupport.VARLEN:
        steps.append(ragged)
    else:
        with pytest.raises(BatchError, match="mixes block lengths"):
            decoder.plan(ragged.common)
    for step in steps:
        rooms = {key: fenced(value) for key, value in step.outputs().items()}
        step.check(step.run(decoder, **{k: inside for k, (inside, _) in rooms.items()}))
        for _, room in rooms.values():
            assert (room[:FENCE] == 123).all()
            assert (room[-FENCE:] == 123).all()


@pytest.mark.fault("QLEN-07")
@pytest.mark.parametrize("name", SERVERS)
def test_a_block_longer_than_its_sequence_leaves_no_row_unwritten(name):
    problem = problem_of(16, 4, needs_lse=True)
    device = SERVERS[name][1]
    decoder = decoder_of(problem, SERVERS[name])
    with pytest.raises(BatchError, match="longer than its sequence") as caught:
        decoder.plan(Step(problem, device, [2]).common)
    assert "add the block" in caught.value.fix
    among_others = Step(problem, device, [2, 70])
    strict = decoder_of(problem, SERVERS[name], validate="device")
    with pytest.raises(BatchError, match="longer than its sequence"):
        strict.plan(among_others.common)
    found = among_others.run(decoder)
    among_others.check(found)
    assert found.lse[:2].isneginf().all()
    assert found.lse[2:].isfinite().all()


@pytest.mark.fault("QLEN-08")
@settings(max_examples=30)
@given(starts=st.lists(st.integers(-3, 9), min_size=3, max_size=3))
def test_offsets_that_are_no_cumulative_sum_are_refused(starts):
    assume(starts[0] != 0 or starts != sorted(starts))
    problem = problem_of(1, {1, 2, 3, 4, 5})
    step = Step(problem, CPU, [40, 40], blocks=[4, 4])
    decoder = MLADecoder(problem, device=CPU)
    wrong = torch.tensor(starts, dtype=torch.int32)
    with pytest.raises(BatchError, match="query_start_loc_cpu") as caught:
        decoder.plan(step.changed(query_start_loc_cpu=wrong).common)
    assert str(starts) in caught.value.got


@pytest.mark.fault("QLEN-08")
@pytest.mark.parametrize("name", SERVERS)
def test_negative_lengths_are_refused_under_device_validation(name):
    problem = problem_of(16)
    decoder = decoder_of(problem, SERVERS[name], validate="device")
    step = Step(problem, decoder.device, [40, 40])
    lens = torch.tensor([40, -1], dtype=torch.int32)
    with pytest.raises(BatchError, match="seq_len") as caught:
        decoder.plan(step.changed(seq_lens=lens).common)
    assert "-1" in caught.value.got


@pytest.mark.fault("QLEN-09")
def test_a_tree_mask_is_refused_by_name_and_its_paths_are_served():
    problem = problem_of(2, {1, 2, 3})
    decoder = MLADecoder(problem, device=CPU)
    step = Step(problem, CPU, [40], blocks=[3])
    parents = [-1, 0, 0, 1, 1]
    tree = torch.eye(5, dtype=torch.bool)
    for at, parent in enumerate(parents):
        if parent >= 0:
            tree[at] |= tree[parent]
    for causal in (tree, tree.float(), parents, "tree"):
        with pytest.raises(MaskError, match="tree mask"):
            decoder.plan(step.changed(causal=causal).common)
    step.check(step.run(decoder))  # the path 0, 1, 3: a chain


@pytest.mark.fault("QLEN-10")
def test_a_length_is_answered_for_the_kernel_that_would_run():
    problem = problem_of(16, 17)
    (kernel,) = backend.kernel_names(problem, amd("gfx950"))
    assert kernel.startswith("mla_a16w16_")
    serve(problem, ("rocm_aiter", amd("gfx950")), [40, 17])
    (reason,) = refusals(problem, ("rocm_aiter", amd("gfx942")))
    assert str(reason.code) == "query_len"
    assert "gfx942's kernel table" in reason.allowed
    assert "17 tokens" in reason.got
