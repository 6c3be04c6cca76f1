"""Each limit of the library is served, and one past it is refused before a tensor."""

from dataclasses import replace

import pytest
import torch

from mla_decode import BackendRefused, Dcp, DeviceInfo, Mask, select
from mla_decode_cuda_flashmla import backend, limits
from mla_decode_cuda_flashmla.inspection import LibraryRefused
from mla_decode_cuda_flashmla.library import installed_library


def codes(problem, device):
    return [str(reason.code) for reason in backend.refusals(problem, device)]


LIMITS = [
    ({"page_size": 64}, {"page_size": 65}, "page_size"),
    ({"page_size": 64}, {"page_size": 32}, "page_size"),
    ({"num_q_heads": 8448}, {"num_q_heads": 8449}, "num_heads"),
    (
        {"num_q_heads": 128, "query_lens": {66}},
        {"num_q_heads": 128, "query_lens": {67}},
        "query_len",
    ),
    (
        {"num_q_heads": 1, "query_lens": {8448}, "max_model_len": 9000},
        {"num_q_heads": 1, "query_lens": {8449}, "max_model_len": 9000},
        "query_len",
    ),
    ({"max_num_reqs": 11622}, {"max_num_reqs": 11623}, "feature"),
    (
        # (max_num_reqs + 2) * 4096 rows * 512 reaches 2**31 at 1022
        {"num_q_heads": 4096, "max_num_reqs": 1021},
        {"num_q_heads": 4096, "max_num_reqs": 1022},
        "feature",
    ),
    ({"kv_page_stride": 36872}, {"kv_page_stride": 36873}, "feature"),
    ({"q_dtype": "bf16"}, {"q_dtype": "bf16", "kv_dtype": "fp16"}, "kv_dtype"),
    ({"q_dtype": "fp16"}, {"q_dtype": "fp32"}, "dtype"),
    ({"q_dtype": "fp16"}, {"q_dtype": "fp16", "out_dtype": "bf16"}, "dtype"),
]


@pytest.mark.parametrize(("inside", "outside", "code"), LIMITS)
def test_a_limit_is_served_and_one_past_it_refused(kit, inside, outside, code):
    device = kit.assumed()
    assert codes(kit.problem(**inside), device) == []
    assert codes(kit.problem(**outside), device) == [code]


FP8_LIMITS = [
    ({"query_lens": {65}}, {"query_lens": {66}}, "query_len"),
    ({"max_num_reqs": 4095}, {"max_num_reqs": 4096}, "feature"),
    ({"kv_page_stride": 36880}, {"kv_page_stride": 36872}, "feature"),
    ({"kv_dtype": "fp8"}, {"kv_dtype": "bf16"}, "kv_dtype"),
]


@pytest.mark.parametrize(("inside", "outside", "code"), FP8_LIMITS)
def test_fp8_has_limits_of_its_own(kit, inside, outside, code):
    device = kit.assumed("sgl")
    assert codes(kit.problem(q_dtype="fp8", **inside), device) == []
    assert codes(kit.problem(q_dtype="fp8", **outside), device) == [code]


def test_fp8_has_no_lse_and_so_no_dcp(kit):
    """On the card the fp8 kernel's LSE is off by up to 0.16 of the scale."""
    for fields in ({"needs_lse": True}, {"dcp": Dcp(world=2, rank=0)}):
        problem = replace(kit.problem(q_dtype="fp8"), **fields)
        assert codes(problem, kit.assumed("sgl")) == ["lse"]


def test_the_2025_scheduler_plans_fewer_requests(kit):
    device = kit.assumed("tile_metadata")
    assert codes(kit.problem(max_num_reqs=4095), device) == []
    assert codes(kit.problem(max_num_reqs=4096), device) == ["feature"]


def test_a_copy_without_fp8_is_refused_with_one_that_has_it(kit):
    reasons = backend.refusals(kit.problem(q_dtype="fp8"), kit.assumed("sched_meta"))
    assert [str(reason.code) for reason in reasons] == ["kv_dtype"]
    assert "sgl-flash-mla" in reasons[0].fix


def test_a_long_verify_of_many_heads_is_refused_at_plan(kit):
    """QLEN-05: 1024 tokens of 16 heads tripped an assertion in the scheduler."""
    problem = kit.problem(num_q_heads=16, query_lens={1024}, max_model_len=2048)
    (reason,) = backend.refusals(problem, kit.assumed())
    assert str(reason.code) == "query_len"
    assert "528" in reason.allowed


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120", "gfx950", "cpu"])
def test_only_hopper_is_served(kit, arch):
    """CAPS-05: 'FlashMLA supports Blackwell' is not true of dense decode."""
    (reason,) = backend.refusals(kit.problem(), DeviceInfo.assume(arch))
    assert str(reason.code) == "arch"
    assert (reason.got, reason.allowed) == (arch, "sm_90")
    assert backend.supports_non_causal(DeviceInfo.assume(arch)) is False


def test_non_causal_blocks_are_refused_with_the_ways_out(kit):
    problem = kit.problem(query_lens={4}, masks={Mask.NON_CAUSAL})
    with pytest.raises(BackendRefused) as refused:
        select(problem, kit.assumed(), backend="cuda_flashmla")
    (reason,) = refused.value.refusals
    assert str(reason.code) == "mask"
    assert "triton_mla" in reason.fix
    assert 'lowering="exact"' in reason.fix


def test_a_one_token_block_is_both_masks_and_is_served(kit):
    problem = kit.problem(query_lens={1}, masks={Mask.NON_CAUSAL}, needs_lse=True)
    assert codes(problem, kit.assumed()) == []
    step = kit.step(problem, [9, 0])
    step = replace(step, common=replace(step.common, causal=False))
    kit.check(kit.run(step, problem), step)


def test_a_causal_block_under_dcp_is_refused_as_dcp(kit):
    """DCP-03: once refused at the first step, and blamed on the cache dtype."""
    problem = kit.problem(query_lens={2}, dcp=Dcp(world=2, rank=0))
    assert codes(problem, kit.assumed()) == ["dcp"]
    assert codes(kit.problem(dcp=Dcp(world=2, rank=0)), kit.assumed()) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": 32},
        {"query_lens": {4}, "masks": {Mask.NON_CAUSAL}},
        {"num_q_heads": 128, "query_lens": {67}},
        {"max_num_reqs": 11623},
        {"query_lens": {2}, "dcp": Dcp(world=2, rank=0)},
    ],
)
def test_a_builder_made_by_hand_refuses_the_same(kit, fields):
    problem = kit.problem(**fields)
    expected = set(codes(problem, kit.assumed()))
    assert expected
    with pytest.raises(BackendRefused) as refused:
        backend.builder_cls(problem, kit.assumed())
    assert expected <= set(refused.value.codes)


def test_a_missing_gpu_and_library_hide_no_other_reason(kit):
    if torch.cuda.is_available():
        pytest.skip("asks a machine without a GPU (issue 6)")
    device = DeviceInfo(vendor="cuda", arch="sm_90")
    found = codes(kit.problem(page_size=16), device)
    assert {"page_size", "device_absent"} <= set(found)
    try:
        installed_library()
    except LibraryRefused:
        assert "dependency" in found or "import" in found


def test_every_reason_says_what_was_asked_what_is_allowed_and_what_to_do(kit):
    problem = kit.problem(
        num_q_heads=9000, page_size=7, kv_page_stride=4033, max_num_reqs=20000
    )
    reasons = backend.refusals(problem, kit.assumed())
    assert len(reasons) >= 4
    for reason in reasons:
        assert reason.message
        assert reason.got
        assert reason.allowed
        assert reason.fix


def test_cost_counts_a_walk_for_every_tile_of_64_rows(kit):
    device = kit.assumed()
    walks = {
        rows: backend.cost(kit.problem(num_q_heads=rows), device).kv_walks
        for rows in (1, 64, 65, 128, 129)
    }
    assert walks == {1: 1, 64: 1, 65: 2, 128: 2, 129: 3}
    assert limits.num_sm_parts(129, 132) == 44
