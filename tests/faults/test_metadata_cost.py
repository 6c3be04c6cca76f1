"""Schedules: one a step, shared by all layers, in buffers that a graph can hold."""

import pytest
import torch
from fault_steps import CPU, SCALE, SERVERS, Step, decoder_of, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import (
    BackendRefused,
    DecodeOutput,
    StaleMetadataError,
    detect_device,
    select,
)
from mla_decode.workspace import held_bytes
from mla_decode_cuda_flashmla.simulator import SimulatedGraph, launches

LAYERS = 61


@pytest.fixture
def planned(monkeypatch):
    """How many schedules the simulated FlashMLA planned: a list of their batch sizes."""
    found = []
    plan = launches.plan_sched_meta

    def counted(seq_lens, num_rows):
        found.append(seq_lens.shape[0])
        return plan(seq_lens, num_rows)

    monkeypatch.setattr(launches, "plan_sched_meta", counted)
    return found


def layers_of(step):
    """A query and a cache of its own for every layer."""
    for layer in range(LAYERS):
        one = step.changed()
        one.q = step.q * (1 + layer / LAYERS)
        one.kv_cache = step.kv_cache.clone() if layer % 20 == 0 else one.kv_cache
        yield one


@pytest.mark.fault("PERF-01", "PERF-06")
@pytest.mark.parametrize("server", ["simulated AITER", "simulated FlashMLA"])
def test_all_layers_of_a_step_share_one_schedule(server, planned):
    problem = problem_of(16, 2)
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(problem, decoder.device, [9, 4])
    for steps in (1, 2):
        plan = decoder.plan(step.common)
        for number, layer in enumerate(layers_of(step)):
            found = layer.run(decoder, plan)
            if number % 12 == 0:
                layer.check(found)
        if server == "simulated AITER":
            assert decoder.builder.library.machine.schedules == steps
        else:
            assert len(planned) == steps
    assert decoder.calls == {"causal": 2 * LAYERS}


@pytest.mark.fault("PERF-06")
@pytest.mark.parametrize("server", list(SERVERS)[:3])
def test_a_shared_plan_ends_with_the_next_build(server):
    problem = problem_of()
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(problem, decoder.device, [9, 4])
    plan = decoder.plan(step.common)
    step.check(step.run(decoder, plan))
    longer = Step(problem, decoder.device, [10, 5])
    longer.check(longer.run(decoder))
    with pytest.raises(StaleMetadataError) as caught:
        step.run(decoder, plan)
    assert "call build for this step" in caught.value.fix
    with pytest.raises(StaleMetadataError, match="geometry"):
        longer.run(decoder, q=longer.q[:1])


@pytest.mark.fault("PERF-03")
def test_a_captured_verify_block_follows_later_builds():
    problem = problem_of(8, 4, graphs=True, needs_lse=True)
    decoder = decoder_of(problem, SERVERS["simulated FlashMLA"])
    first = Step(problem, decoder.device, [200, 70, 64])
    plan, graph = decoder.plan_for_capture(first.common), SimulatedGraph()
    buffers = first.outputs()
    with graph.capture():
        first.run(decoder, plan, **buffers)
    for lens in ([200, 70, 64], [4, 5, 6], [130, 9, 63]):
        later = torch.tensor(lens, dtype=torch.int32)
        step = first.changed(seq_lens=later, max_seq_len=max(lens))
        decoder.plan(step.common)
        graph.replay()
        step.check(DecodeOutput(**buffers))


@pytest.mark.fault("PERF-03")
def test_everything_that_aiter_reads_is_built_into_buffers_that_stay():
    problem = problem_of(8, 4, graphs=True)
    decoder = decoder_of(problem, SERVERS["simulated AITER"])
    seen = set()
    for lens in ([200, 70], [4, 5], [130, 9]):
        step = Step(problem, decoder.device, lens)
        plan = decoder.plan(step.common)
        addresses = [plan.kv_indptr, plan.kv_indices, plan.kv_last_page_lens]
        addresses += [plan.is_empty, plan.query_start_loc]
        addresses += [plan.schedule.work_indptr, plan.schedule.work_info_set]
        seen.add(tuple(tensor.data_ptr() for tensor in addresses))
        step.check(step.run(decoder, plan))
    assert len(seen) == 1


CAPS = (1, 2, 3, 5, 8, 16, 64, 128, None)


@pytest.mark.fault("PERF-04")
@pytest.mark.parametrize("server", ["reference", "interpreted Triton"])
@settings(max_examples=8)
@given(
    heads=st.sampled_from([1, 16, 128]),
    query_len=st.sampled_from([1, 4]),
    requests=st.sampled_from([1, 8, 64, 512]),
    dtypes=st.sampled_from(["bf16 bf16", "bf16 fp8"]),
)
def test_scratch_grows_with_the_cap_on_splits_and_never_past_none(
    server, heads, query_len, requests, dtypes
):
    name, device = SERVERS[server]
    sizes = []
    for cap in CAPS:
        problem = problem_of(
            heads,
            query_len,
            dtypes=dtypes,
            max_num_reqs=requests,
            max_model_len=32768,
            max_splits=cap,
        )
        sizes.append(select(problem, device, name).workspace.total)
    assert sizes == sorted(sizes)
    if server != "reference" and requests == 1:
        assert sizes[0] < sizes[-1]


@pytest.mark.fault("PERF-04")
@pytest.mark.parametrize("server", SERVERS)
def test_a_budget_refuses_one_byte_less_before_anything_is_allocated(
    server, monkeypatch
):
    name, device = SERVERS[server]
    problem = problem_of(128, 2, max_num_reqs=64)
    workspace = select(problem, device, name).workspace

    def forbidden(*_args, **_kwargs):
        raise AssertionError("memory was taken before the budget was asked")

    with monkeypatch.context() as patch:
        for maker in ("empty", "zeros", "ones", "full", "arange"):
            patch.setattr(torch, maker, forbidden)
        with pytest.raises(BackendRefused) as caught:
            decoder_of(
                problem, SERVERS[server], workspace_limit_bytes=workspace.total - 1
            )
    (reason,) = caught.value.refusals
    assert str(reason.code) == "workspace"
    assert str(workspace.total) in reason.got
    assert "raise the limit" in reason.fix
    decoder = decoder_of(
        problem, SERVERS[server], workspace_limit_bytes=workspace.total
    )
    step = Step(problem, device, [9, 4])
    plan = decoder.plan(step.common)
    if server != "interpreted Triton":  # 128 heads are seconds there
        step.check(step.run(decoder, plan))
    assert held_bytes(decoder.builder) <= workspace.total
    assert decoder.report().workspace_bytes == workspace.total


@pytest.mark.fault("PERF-03")
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_captures_a_verify_block_and_replays_it_over_later_lengths():
    problem = problem_of(8, 4, graphs=True)
    decoder = decoder_of(problem, ("triton_mla", detect_device()))
    first = Step(problem, CPU, [200, 70, 64])

    def on_gpu(lens):
        common = first.common
        return first.changed(
            query_start_loc=common.query_start_loc.cuda(),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device="cuda"),
            block_table_tensor=common.block_table_tensor.cuda(),
        ).common

    q, cache = first.q.cuda(), first.kv_cache.cuda()
    plan = decoder.plan_for_capture(on_gpu([200, 70, 64]))
    out = decoder.run(q, cache, plan, softmax_scale=SCALE).out
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.run(q, cache, plan, softmax_scale=SCALE, out=out)
    for lens in ([200, 70, 64], [4, 5, 6], [130, 9, 63]):
        later = torch.tensor(lens, dtype=torch.int32)
        decoder.plan(on_gpu(lens))
        graph.replay()
        first.changed(seq_lens=later).check(DecodeOutput(out.cpu(), None))
