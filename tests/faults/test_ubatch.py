"""Micro-batches: every field in every part, a builder and buffers of its own."""

import pytest
import torch
from fault_steps import CPU, SCALE, SERVERS, Step, decoder_of, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import BatchError, UbatchBuilders, split_ubatches
from mla_decode_cuda_flashmla.simulator import SimulatedGraph


@pytest.mark.fault("UBATCH-02")
@settings(max_examples=40)
@given(requests=st.integers(1, 8), parts=st.integers(-1, 9))
def test_every_part_has_a_request_and_is_built_or_nothing_is_split(requests, parts):
    problem = problem_of(2, page_size=16)
    common = Step(problem, CPU, [5] * requests).common
    if 1 <= parts <= requests:
        sizes = [part.num_reqs for part in split_ubatches(common, parts)]
        assert sum(sizes) == requests
        assert max(sizes) - min(sizes) <= 1
        cls = decoder_of(problem, SERVERS["reference"]).backend.builder_cls
        builders = UbatchBuilders(cls, problem, CPU, num_ubatches=parts)
        plans = builders.build(common)
        assert [plan.num_reqs for plan in plans] == sizes
    else:
        with pytest.raises(BatchError) as caught:
            split_ubatches(common, parts)
        assert "run a batch of so few requests as one" in caught.value.fix


@pytest.mark.fault("UBATCH-03")
@settings(max_examples=30)
@given(
    lens=st.lists(st.integers(3, 60), min_size=2, max_size=6),
    query_len=st.integers(1, 3),
    pads=st.integers(0, 2),
    causal=st.booleans(),
    data=st.data(),
)
def test_a_part_is_its_requests_and_nothing_is_lost(
    lens, query_len, pads, causal, data
):
    problem = problem_of(2, query_len, causal=causal, page_size=16)
    whole = Step(problem, CPU, lens, pads=pads, causal=causal)
    common = whole.common
    rows = common.num_reqs * query_len
    common = whole.changed(slot_mapping=torch.arange(rows)).common
    cut = data.draw(st.integers(1, common.num_reqs - 1)) * query_len
    decoder = decoder_of(problem, SERVERS["reference"])
    found, begin = [], 0
    for part in split_ubatches(common, [cut]):
        end = begin + part.num_reqs
        mine = slice(begin, end)
        assert part.seq_lens.tolist() == common.seq_lens[mine].tolist()
        assert torch.equal(part.block_table_tensor, common.block_table_tensor[mine])
        assert part.query_start_loc_cpu[0] == part.query_start_loc[0] == 0
        slots = slice(begin * query_len, end * query_len)
        assert torch.equal(part.slot_mapping, common.slot_mapping[slots])
        assert part.causal is causal
        plan = decoder.plan(part)
        found.append(
            decoder.run(whole.q[slots], whole.kv_cache, plan, softmax_scale=SCALE).out
        )
        begin = end
    whole.check(whole.run(decoder)._replace(out=torch.cat(found)))


@pytest.mark.fault("UBATCH-04")
@pytest.mark.parametrize("server", list(SERVERS)[1:])
def test_a_parts_table_and_lengths_keep_their_addresses(server):
    problem = problem_of(graphs=True, max_model_len=128)
    backend = decoder_of(problem, SERVERS[server])
    builders = UbatchBuilders(
        backend.backend.builder_cls, problem, backend.device, num_ubatches=2
    )
    seen = set()
    for lens in ([9, 64, 30, 1], [70, 2, 65, 64], [1, 1, 1, 1]):
        step = Step(problem, backend.device, lens)
        parts = builders.build(step.common)
        seen.add(
            tuple(
                (part.block_table.data_ptr(), part.seq_lens.data_ptr())
                for part in parts
            )
        )
        for part, rows in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
            found = backend.backend.forward(
                step.q[rows], step.kv_cache, part, softmax_scale=SCALE
            )
            truth = step.truth()[0][rows]
            torch.testing.assert_close(found.out.double(), truth, atol=0.02, rtol=0.02)
    ((first, second),) = seen
    assert not set(first) & set(second)


@pytest.mark.fault("UBATCH-04")
def test_a_graph_a_part_replays_a_later_steps_values():
    problem = problem_of(graphs=True, needs_lse=True)
    server = SERVERS["simulated FlashMLA"]
    decoders = [decoder_of(problem, server) for _ in range(2)]
    first = Step(problem, server[1], [70, 9, 64, 30])
    outs, graphs = [], []
    for decoder, part, rows in zip(
        decoders,
        split_ubatches(first.common, 2),
        (slice(0, 2), slice(2, 4)),
        strict=True,
    ):
        plan, graph = decoder.plan_for_capture(part), SimulatedGraph()
        with graph.capture():
            outs.append(
                decoder.run(first.q[rows], first.kv_cache, plan, softmax_scale=SCALE)
            )
        graphs.append(graph)
    for lens in ([70, 9, 64, 30], [30, 1, 2, 29], [64, 8, 63, 7]):
        later = torch.tensor(lens, dtype=torch.int32)
        step = first.changed(seq_lens=later, max_seq_len=int(later.max()))
        parts = split_ubatches(step.common, 2)
        for decoder, part in reversed(list(zip(decoders, parts, strict=True))):
            decoder.plan(part)
        for graph in graphs:
            graph.replay()
        truth, lse = step.truth()
        out = torch.cat([found.out for found in outs]).double()
        torch.testing.assert_close(out, truth, atol=0.02, rtol=0.02)
        found = torch.cat([found.lse for found in outs]).double()
        torch.testing.assert_close(found, lse, atol=1e-3, rtol=1e-3)
