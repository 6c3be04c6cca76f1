"""Addresses past 32 bits, over caches that are files with holes: only pages are real."""

import pytest
import torch
from fault_steps import CPU, SCALE, SERVERS, Step, decoder_of, problem_of

from mla_decode import PagedLatentCache, detect_device

PAGE = 64 * 576
BYTES, ELEMENTS, UNSIGNED = 2**31 // 2, 2**31, 2**32
"""Where 2 GiB of bf16 end, int32 elements, and uint32 elements."""


@pytest.fixture(scope="module")
def hollow(tmp_path_factory):
    """A bf16 file past every threshold, of which nothing is on the disk yet."""
    path = tmp_path_factory.mktemp("cache") / "cache.bin"
    size = UNSIGNED + 8 * 480 * 576
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)


def paged(storage, page_size):
    pages = storage.numel() // (page_size * 576)
    shape, strides = (pages, page_size, 576), (page_size * 576, 576, 1)
    return storage.as_strided(shape, strides)


def around(threshold, page_size):
    """Pages on both sides of an element offset, the one across it, and page 0."""
    across = threshold // (page_size * 576)
    return [across - 1, across, across + 1, 0]


def serve_pages(server, hollow, threshold, page_size):
    problem = problem_of(page_size=page_size, max_num_reqs=4)
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(
        problem,
        decoder.device,
        [page_size, page_size, 1, 1],
        cache=paged(hollow, page_size),
        pages=around(threshold, page_size),
    )
    step.check(step.run(decoder))


@pytest.mark.fault("OVERFLOW-02")
@pytest.mark.parametrize("threshold", [BYTES, ELEMENTS])
@pytest.mark.parametrize("page_size", [1, 16])
def test_aiter_is_given_rows_past_two_gibibytes_by_number(hollow, threshold, page_size):
    serve_pages("simulated AITER", hollow, threshold, page_size)


@pytest.mark.fault("OVERFLOW-03")
@pytest.mark.parametrize("threshold", [BYTES, ELEMENTS, UNSIGNED])
@pytest.mark.parametrize("server", SERVERS)
def test_pages_on_both_sides_of_a_threshold_are_read_right(hollow, server, threshold):
    serve_pages(server, hollow, threshold, 64)


@pytest.mark.fault("OVERFLOW-04")
@pytest.mark.parametrize("server", ["reference", "interpreted Triton"])
def test_pages_around_four_gibi_elements_do_not_wrap(hollow, server):
    serve_pages(server, hollow, UNSIGNED, 32)


@pytest.mark.fault("OVERFLOW-05")
@pytest.mark.parametrize("slot", [ELEMENTS // 576, 3_728_271])
def test_what_is_written_at_a_high_slot_is_read_back(hollow, slot):
    problem = problem_of(2)
    cache = PagedLatentCache(1, 64, dtype=torch.bfloat16)
    cache.layers = (paged(hollow, 64),)
    first = slot // 64 - 1
    cache._free = [first + 2, first + 1, first]  # the lower ones are taken
    cache.allocate("request")
    latents = torch.randn(150, 576).bfloat16()
    slots = cache.append("request", [latents])
    assert slot in slots.tolist()
    assert slots.dtype == torch.int64
    assert torch.equal(cache.layers[0].view(-1, 576)[slots], latents)
    step = Step(
        problem, CPU, [150], cache=cache.layers[0], pages=[first, first + 1, first + 2]
    )
    cache.write(0, slots, latents)
    common = cache.batch(["request"], [1])
    step = step.changed(block_table_tensor=common.block_table_tensor)
    step.check(step.run(decoder_of(problem, SERVERS["reference"])))


@pytest.mark.fault("OVERFLOW-03", "OVERFLOW-04")
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("page_size", "threshold"), [(64, ELEMENTS), (64, UNSIGNED), (32, UNSIGNED)]
)
def test_a_gpu_reads_pages_on_both_sides_of_a_threshold(page_size, threshold):
    device = detect_device()
    flat = torch.zeros(UNSIGNED + 4 * PAGE, dtype=torch.bfloat16, device="cuda")
    problem = problem_of(page_size=page_size, max_num_reqs=4)
    decoder = decoder_of(problem, ("triton_mla", device))
    step = Step(
        problem,
        CPU,
        [page_size, page_size - 1, 3, 2],
        cache=paged(flat, page_size),
        pages=around(threshold, page_size),
    )
    common = step.common
    on_gpu = step.changed(
        query_start_loc=common.query_start_loc.cuda(),
        seq_lens=common.seq_lens.cuda(),
        block_table_tensor=common.block_table_tensor.cuda(),
    )
    out = decoder.run(
        step.q.cuda(),
        step.kv_cache,
        decoder.plan(on_gpu.common),
        softmax_scale=SCALE,
    ).out
    truth, _ = step.truth()
    torch.testing.assert_close(out.cpu().double(), truth, atol=0.02, rtol=0.02)
