"""The simulator: its schedules cover every page once, its faults are the library's."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode_cuda_flashmla.limits import H200_SMS, num_sm_parts
from mla_decode_cuda_flashmla.simulator import (
    IllegalAccess,
    ProcessExit,
    SimulatedGraph,
    launches,
    raising_exits,
    sched_meta_api,
    tile_metadata_api,
)
from mla_decode_cuda_flashmla.simulator.attention import FIRST, SM90, segments
from mla_decode_cuda_flashmla.simulator.schedule import (
    sched_meta_schedule,
    tile_metadata_schedule,
)

LENS = st.lists(st.integers(0, 3000) | st.integers(0, 200_000), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(lens=LENS, rows=st.integers(1, 8448), model=st.sampled_from([SM90, FIRST]))
def test_a_schedule_walks_every_page_once_and_numbers_its_splits(lens, rows, model):
    make = sched_meta_schedule if model is SM90 else tile_metadata_schedule
    tiles, splits = make(lens, num_sm_parts(rows, H200_SMS))
    walked = {request: [] for request in range(len(lens))}
    numbers = {request: [] for request in range(len(lens))}
    for segment in segments(tiles, splits, lens, model):
        walked[segment.request] += range(segment.begin, segment.end)
        if segment.split is not None:
            numbers[segment.request].append(segment.split)
    before = splits.tolist()
    for request, length in enumerate(lens):
        assert walked[request] == list(range(-(-length // 64)))
        given_out = list(range(before[request], before[request + 1]))
        assert numbers[request] == (given_out if len(given_out) > 1 else [])


def decode_arguments(**changes):
    arguments = {
        "q": torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16),
        "k_cache": torch.zeros(2, 64, 1, 576, dtype=torch.bfloat16),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "cache_seqlens": torch.ones(1, dtype=torch.int32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": sched_meta_api.get_mla_metadata()[0],
    }
    return arguments | changes


CHECKS = {
    "key must have the same dtype": {"k_cache": torch.zeros(2, 64, 1, 576)},
    "page_block_size": {"k_cache": torch.zeros(2, 32, 1, 576).bfloat16()},
    "block_table must have dtype": {"block_table": torch.zeros(1, 1)},
    "seqlens_k must have dtype": {"cache_seqlens": torch.ones(1)},
    "q must have contiguous": {
        "q": torch.zeros(1, 1, 16, 1152, dtype=torch.bfloat16)[..., ::2]
    },
}


@pytest.mark.parametrize("message", sorted(CHECKS))
def test_a_failed_check_is_an_exception(message):
    with pytest.raises(RuntimeError, match=message):
        sched_meta_api.flash_mla_with_kvcache(**decode_arguments(**CHECKS[message]))


def test_a_failed_assertion_ends_the_process_with_status_1():
    code = (
        "import torch\n"
        "from mla_decode_cuda_flashmla.simulator import launches\n"
        "launches.plan_sched_meta(torch.ones(11623, dtype=torch.int32), 16)\n"
        "print('served')\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert child.returncode == 1
    assert "served" not in child.stdout
    assert "CUDA error (simulated)" in child.stderr


def test_in_raise_mode_the_end_of_the_process_is_an_exception():
    long = torch.ones(11622, dtype=torch.int32)
    launches.plan_sched_meta(long, 16)
    fixed = torch.ones(4095, dtype=torch.int32)
    launches.plan_tile_metadata(fixed, 16)
    narrow = torch.zeros(1, 1, 16, 512, dtype=torch.bfloat16)
    pages = torch.zeros(2, 64, 1, 512, dtype=torch.bfloat16)
    apart = torch.zeros(2 * 36873, dtype=torch.bfloat16)
    apart = apart.as_strided((2, 64, 1, 576), (36873, 576, 576, 1))
    with raising_exits():
        with pytest.raises(ProcessExit, match="shared memory"):
            launches.plan_sched_meta(torch.ones(11623, dtype=torch.int32), 16)
        with pytest.raises(ProcessExit, match="MaxBatchSize"):
            launches.plan_tile_metadata(torch.ones(4096, dtype=torch.int32), 16)
        with pytest.raises(ProcessExit, match="HEAD_DIM_K"):
            sched_meta_api.flash_mla_with_kvcache(
                **decode_arguments(q=narrow, k_cache=pages)
            )
        with pytest.raises(ProcessExit, match="tensor map"):
            sched_meta_api.flash_mla_with_kvcache(**decode_arguments(k_cache=apart))


def test_the_first_kernel_reads_before_an_empty_requests_table():
    lens = torch.tensor([0], dtype=torch.int32)
    tiles, splits = tile_metadata_api.get_mla_metadata(lens, 16, 1)
    arguments = decode_arguments(
        cache_seqlens=lens, tile_scheduler_metadata=tiles, num_splits=splits
    )
    with pytest.raises(IllegalAccess):
        tile_metadata_api.flash_mla_with_kvcache(**arguments)


def test_a_graph_replays_over_addresses_and_not_over_values():
    source, target = torch.ones(3), torch.zeros(3)
    graph = SimulatedGraph()
    with graph.capture():
        doubled = source * 2
        target.copy_(doubled.view(3) + 1)
    source.fill_(5.0)
    graph.replay()
    assert torch.equal(target, torch.full((3,), 11.0))
    assert torch.equal(doubled, torch.full((3,), 10.0))
