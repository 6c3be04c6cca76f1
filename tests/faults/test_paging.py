"""Faults of paging: sizes, last pages, tables and what lies past them."""

import re

import pytest
import torch
from fault_steps import (
    CPU,
    HOPPER,
    SCALE,
    SERVERS,
    Step,
    amd,
    codes,
    decoder_of,
    narrow,
    problem_of,
    refusals,
    serve,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import (
    BatchError,
    DecodeProblem,
    MLADecoder,
    PagedLatentCache,
    StaleMetadataError,
)

FLASHMLA = ("cuda_flashmla", HOPPER)


@pytest.mark.fault("PAGE-02")
@pytest.mark.parametrize("page_size", [1, 16, 32, 63, 65, 128])
def test_a_page_size_outside_the_backends_own_is_refused_with_both(page_size):
    (reason,) = refusals(problem_of(page_size=page_size), FLASHMLA)
    assert (str(reason.code), reason.got) == ("page_size", str(page_size))
    assert reason.allowed == "64"
    assert "--block-size" in reason.fix


@pytest.mark.fault("PAGE-05")
@pytest.mark.parametrize("name", SERVERS)
def test_full_last_pages_are_read_whole(name):
    lens = [1, 63, 64, 65, 128, 129, 0]
    decoder, step, _ = serve(problem_of(2), SERVERS[name], lens)
    if name == "simulated AITER":
        plan = decoder.plan(step.common)
        assert plan.kv_indptr.diff().tolist() == lens
        assert plan.kv_last_page_lens.tolist() == [1] * len(lens)


@pytest.mark.fault("PAGE-05")
@settings(max_examples=30)
@given(
    lens=st.lists(st.integers(0, 20), min_size=1, max_size=6), page=st.integers(1, 9)
)
def test_a_request_holds_exactly_the_pages_of_its_tokens(lens, page):
    cache = PagedLatentCache(200, page)
    for request, length in enumerate(lens):
        before = cache.num_free_pages
        cache.allocate(request)
        cache.extend(request, length)
        assert before - cache.num_free_pages == (length + page - 1) // page
    steps = [n for n in lens if n]
    if steps:
        serve(problem_of(1, page_size=page), SERVERS["reference"], steps)


@pytest.mark.fault("PAGE-06")
def test_a_page_size_is_served_as_it_is_or_refused():
    for lowering in ("refuse", "exact"):
        problem = problem_of(8, 2, causal=False, page_size=32)
        assert codes(problem, FLASHMLA, lowering) >= {"page_size"}
    for name in ("reference", "simulated AITER", "interpreted Triton"):
        problem = problem_of(8, page_size=32)
        decoder, step, _ = serve(problem, SERVERS[name], [40, 100])
        assert decoder.builder.problem.page_size == 32
        other = Step(problem_of(8, page_size=64), decoder.device, [40, 100])
        plan = decoder.plan(step.common)
        with pytest.raises(StaleMetadataError, match=r"\[pages, 32, 576\]"):
            decoder.run(step.q, other.kv_cache, plan, softmax_scale=SCALE)


@pytest.mark.fault("PAGE-07")
def test_the_default_page_size_is_served_everywhere():
    assert DecodeProblem(num_q_heads=16).page_size == 64
    for server in SERVERS.values():
        decoder = decoder_of(DecodeProblem(num_q_heads=16), server)
        row = decoder.backend.capability.row(decoder.device.arch)
        assert 64 in row.page_sizes
    server = (narrow(page_sizes=frozenset({32, 64})), CPU)
    (reason,) = refusals(problem_of(page_size=16), server)
    assert (str(reason.code), reason.allowed) == ("page_size", "32, 64")


@pytest.mark.fault("PAGE-08")
def test_a_page_under_the_least_is_refused_and_none_is_inferred():
    server = (narrow(page_sizes=range(2, 129)), CPU)
    (reason,) = refusals(problem_of(page_size=1), server)
    assert (str(reason.code), reason.got, reason.allowed) == (
        "page_size",
        "1",
        "2..128",
    )
    for server in SERVERS.values():
        decoder = decoder_of(problem_of(2), server)
        step = Step(decoder.problem, decoder.device, [40])
        plan = decoder.plan(step.common)
        pages = step.kv_cache.shape[0]
        for shape in ((pages * 64, 1, 576), (pages * 2, 32, 576), (pages, 32, 1152)):
            with pytest.raises(StaleMetadataError, match="kv_cache has another"):
                decoder.run(
                    step.q, step.kv_cache.reshape(shape), plan, softmax_scale=SCALE
                )
        step.check(step.run(decoder, plan))


@pytest.mark.fault("PAGE-09")
@pytest.mark.parametrize("name", SERVERS)
def test_a_sequence_past_the_plan_is_refused_with_both_numbers(name):
    server = SERVERS[name]
    step = Step(problem_of(2, max_model_len=2000), server[1], [2000])
    decoder = decoder_of(problem_of(2, max_model_len=1024), server)
    with pytest.raises(BatchError, match="max_seq_len") as caught:
        decoder.plan(step.common)
    assert (caught.value.got, caught.value.allowed) == ("2000", "0..1024")
    assert "max_model_len" in caught.value.fix
    graphs = name not in {"reference", "interpreted Triton"}
    roomy = decoder_of(problem_of(2, max_model_len=4096, graphs=graphs), server)
    table = step.common.block_table_tensor[:, :16].contiguous()
    cut = step.changed(block_table_tensor=table).common
    for plan in (roomy.plan, roomy.plan_for_capture) if graphs else (roomy.plan,):
        with pytest.raises(BatchError, match="block_table_tensor") as caught:
            plan(cut)
        assert "[1, 16]" in caught.value.got
        assert ">= 32" in caught.value.allowed
    if graphs:
        assert roomy.plan(step.common).block_table.shape[1] == 64


@pytest.mark.fault("PAGE-10")
@pytest.mark.parametrize("name", SERVERS)
def test_the_table_may_be_narrower_than_the_cache_and_names_its_pages(name):
    problem = problem_of(2, max_model_len=256)
    decoder = decoder_of(problem, SERVERS[name])
    step = Step(problem, decoder.device, [130, 65])
    pages = torch.tensor([[97, 5, 42], [0, 99, 7]], dtype=torch.int32)
    cache = torch.full((100, 64, 576), torch.nan, dtype=step.kv_cache.dtype)
    old = step.common.block_table_tensor
    for request, count in enumerate((3, 2)):
        for at in range(count):
            cache[pages[request, at]] = step.kv_cache[old[request, at]]
    step = step.changed(block_table_tensor=pages)
    step.kv_cache = cache
    step.check(step.run(decoder))
    strict = decoder_of(problem, SERVERS[name], validate="device")
    step.check(step.run(strict))
    past = pages.clone()
    past[1, 2] = 100  # behind the request's second page: no slot of its own
    step.check(step.changed(block_table_tensor=past).run(strict))
    past[1, 1] = 100
    with pytest.raises(BatchError, match="past the cache") as caught:
        step.changed(block_table_tensor=past).run(strict)
    assert re.search(r"page 100\b", caught.value.got)
    assert caught.value.allowed == "0..99"


@pytest.mark.fault("PAGE-11")
@pytest.mark.parametrize("page_size", [3, 48, 100])
def test_pages_of_no_power_of_two_are_right_or_refused(page_size):
    problem = problem_of(2, page_size=page_size)
    for server in (
        SERVERS["reference"],
        ("rocm_aiter", amd()),
        ("rocm_aiter", amd("gfx942")),
    ):
        serve(problem, server, [page_size, 101])
    for server in (FLASHMLA, SERVERS["interpreted Triton"]):
        assert codes(problem, server) == {"page_size"}
    auto = MLADecoder(problem, device=amd())
    assert auto.selection.backend.name == "rocm_aiter"
