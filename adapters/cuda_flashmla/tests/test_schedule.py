"""STALE and STABLE: whose lengths a schedule holds, in eager steps and in graphs."""

from dataclasses import replace

import pytest
import torch

from mla_decode import BatchError, StaleMetadataError, UbatchBuilders
from mla_decode_cuda_flashmla import backend
from mla_decode_cuda_flashmla.simulator import (
    SimulatedGraph,
    ops,
    sched_meta_api,
    sgl_api,
)

FORMS = [("sched_meta", "bf16"), ("tile_metadata", "bf16"), ("sgl", "fp8")]


def layers_of(step, count):
    """The same step's tensors for several layers."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        q = torch.randn(step.q.shape, generator=generator).to(step.q.dtype)
        yield replace(step, q=q)


def forward(kit, step, metadata, **outputs):
    return backend.forward(
        step.q, step.kv, metadata, softmax_scale=kit.SCALE, **step.scales, **outputs
    )


def outputs_of(step, heads=16):
    rows = step.q.shape[0]
    out = torch.zeros((rows, heads, 512), dtype=torch.bfloat16)
    return (
        {"out": out} if step.scales else {"out": out, "lse": torch.zeros(rows, heads)}
    )


def counted_plans(monkeypatch):
    calls = []
    plan = ops.plan
    monkeypatch.setattr(ops, "plan", lambda *args: calls.append(args) or plan(*args))
    return calls


@pytest.mark.parametrize("api", [sched_meta_api, sgl_api])
def test_the_library_itself_serves_changed_lengths_wrongly_in_silence(kit, api):
    """The fault that the adapter exists to keep away: nothing is raised."""
    problem = kit.problem(needs_lse=True)
    step = kit.step(problem, [64, 600], capacity=1000)
    schedule = api.get_mla_metadata()[0]
    extra = {"use_legacy": True} if api is sgl_api else {}

    def raw(lens):
        return api.flash_mla_with_kvcache(
            q=step.q.view(2, 1, 16, 576),
            k_cache=step.kv.unsqueeze(2),
            block_table=step.common.block_table_tensor,
            cache_seqlens=torch.tensor(lens, dtype=torch.int32),
            head_dim_v=512,
            tile_scheduler_metadata=schedule,
            softmax_scale=kit.SCALE,
            **extra,
        )[0]

    right = step.oracle()[0]
    assert (raw([64, 600])[:, 0].double() - right).norm() < 0.01 * right.norm()
    grown = step.with_lens([64, 1000])
    wrong = raw([64, 1000])[:, 0].double()
    assert (wrong - grown.oracle()[0]).norm() > 0.05 * right.norm()


def test_a_schedule_of_another_shape_is_an_assertion_of_the_library(kit):
    problem = kit.problem()
    step = kit.step(problem, [64, 600])
    schedule = sched_meta_api.get_mla_metadata()[0]

    def raw(rows):
        return sched_meta_api.flash_mla_with_kvcache(
            q=step.q[:rows].view(rows, 1, 16, 576),
            k_cache=step.kv.unsqueeze(2),
            block_table=step.common.block_table_tensor[:rows],
            cache_seqlens=step.common.seq_lens[:rows],
            head_dim_v=512,
            tile_scheduler_metadata=schedule,
        )

    raw(2)
    with pytest.raises(AssertionError, match=r"config\.b must be equal"):
        raw(1)


@pytest.mark.parametrize(("release", "dtype"), FORMS)
def test_all_layers_of_a_step_share_one_schedule(kit, monkeypatch, release, dtype):
    problem = kit.problem(q_dtype=dtype, needs_lse=True)
    step = kit.step(problem, [64, 600, 0])
    builder = backend.builder_cls(problem, kit.assumed(release))
    plans = counted_plans(monkeypatch)
    for _ in range(2):
        metadata = builder.build(step.common)
        for layer in layers_of(step, 3):
            kit.check(forward(kit, layer, metadata), layer, dtype)
    assert len(plans) == 2


def test_metadata_of_an_earlier_build_is_refused(kit):
    problem = kit.problem()
    step = kit.step(problem, [64, 600])
    builder = backend.builder_cls(problem, kit.assumed())
    old = builder.build(step.common)
    builder.build(step.common)
    with pytest.raises(StaleMetadataError):
        forward(kit, step, old)


def test_a_cache_at_an_odd_address_is_refused_and_named(kit):
    problem = kit.problem()
    step = kit.step(problem, [64])
    metadata = backend.builder_cls(problem, kit.assumed()).build(step.common)
    pages = step.kv.shape[0]
    odd = torch.zeros(pages * 64 * 576 + 1, dtype=torch.bfloat16)[1:]
    odd = odd.view(pages, 64, 576)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        forward(kit, replace(step, kv=odd), metadata)


@pytest.mark.parametrize(("release", "dtype"), FORMS)
def test_sixty_growing_replays_follow_later_builds(kit, release, dtype):
    problem = kit.problem(
        num_q_heads=2,
        q_dtype=dtype,
        query_lens={2},
        needs_lse=True,
        graphs=True,
        max_num_reqs=4,
        max_model_len=512,
    )
    step = kit.step(problem, [2, 64, 2, 0], 2, capacity=448)
    builder = backend.builder_cls(problem, kit.assumed(release))
    outputs = outputs_of(step, 2)
    recorded = builder.build_for_capture(step.common)
    forward(kit, step, recorded, **outputs)  # engines warm up with the same metadata
    graph = SimulatedGraph()
    with graph.capture():
        for layer in (step, step):
            output = forward(kit, layer, recorded, **outputs)
    for replay in range(60):
        lens = [2 + 7 * replay, 64 + replay, 0 if replay % 3 else 9, 0]
        now = step.with_lens(lens)
        builder.build(now.common)
        for tensor in outputs.values():
            tensor.fill_(float("nan"))
        graph.replay()
        kit.check(output, now, dtype)


def test_two_captures_of_one_metadata_each_plan_their_own(kit):
    """A schedule planned in one graph is only as fresh as that graph's last replay."""
    problem = kit.problem(needs_lse=True, graphs=True)
    step = kit.step(problem, [64, 600], capacity=1000)
    builder = backend.builder_cls(problem, kit.assumed())
    recorded = builder.build_for_capture(step.common)
    graphs, outputs = [], []
    for _ in range(2):
        graph, target = SimulatedGraph(), outputs_of(step)
        with graph.capture():
            outputs.append(forward(kit, step, recorded, **target))
        graphs.append(graph)
    grown = step.with_lens([900, 1000])
    builder.build(grown.common)
    graphs[1].replay()
    kit.check(outputs[1], grown)


def test_stable_buffers_keep_their_addresses(kit):
    problem = kit.problem(graphs=True, q_dtype="fp8", query_lens={2})
    step = kit.step(problem, [64, 600], 2, capacity=1000)
    builder = backend.builder_cls(problem, kit.assumed("sgl"))

    def addresses(metadata):
        tensors = (metadata.kernel_table, metadata.kernel_lens, metadata.empty)
        return [tensor.data_ptr() for tensor in tensors]

    first = addresses(builder.build_for_capture(step.common))
    later = step.with_lens([1000, 0])
    assert addresses(builder.build(later.common)) == first


def test_two_builders_interleaved_give_what_each_gives_alone(kit):
    problem = kit.problem(needs_lse=True)
    step = kit.step(problem, [64, 600, 9, 300])
    alone = kit.run(step, problem)
    builders = UbatchBuilders(
        backend.builder_cls, problem, kit.assumed(), num_ubatches=2
    )
    parts = builders.build(step.common)
    halves = [
        forward(kit, replace(step, q=step.q[rows]), part)
        for part, rows in zip(parts, (slice(0, 2), slice(2, 4)), strict=True)
    ]
    kit.check(alone, step)
    joined = torch.cat([half.out for half in halves])
    torch.testing.assert_close(joined, alone.out, rtol=0, atol=2e-2)


def test_a_ragged_batch_is_refused_by_the_uniform_builder(kit):
    problem = kit.problem(query_lens={1, 2})
    step = kit.step(problem, [64, 600], 2)
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    ragged = replace(
        step.common,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        num_actual_tokens=3,
    )
    with pytest.raises(BatchError, match="mixes block lengths"):
        backend.builder_cls(problem, kit.assumed()).build(ragged)
