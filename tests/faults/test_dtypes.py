"""Faults of dtypes: which fp8 it is, what its scales mean, and what they round away."""

import inspect
import types

import pytest
import torch
from fault_steps import (
    CPU,
    HOPPER_FP8,
    SCALE,
    SERVERS,
    Step,
    amd,
    decoder_of,
    problem_of,
    serve,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import (
    ArgumentError,
    BackendRefused,
    DeviceInfo,
    MLADecoder,
    PagedLatentCache,
    StaleMetadataError,
    select,
)
from mla_decode import device as device_module
from mla_decode.dtypes import fp8_dtype
from mla_decode_rocm_aiter.simulator import Faults, simulated

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FP8 = {
    "reference": (("reference", CPU), "fp8 fp8"),
    "reference over fp8": (("reference", CPU), "bf16 fp8"),
    "gfx950": (("rocm_aiter", amd()), "fp8 fp8"),
    "gfx942": (("rocm_aiter", amd("gfx942")), "fp8 fp8"),
    "gfx950 over fp8": (("rocm_aiter", amd()), "bf16 fp8"),
    "FlashMLA": (("cuda_flashmla", HOPPER_FP8), "fp8 fp8"),
    "Triton": (SERVERS["interpreted Triton"], "bf16 fp8"),
}
"""Everything that serves an fp8 cache: where, and its dtypes."""


@pytest.mark.fault("DTYPE-02")
@pytest.mark.parametrize(
    ("arch", "own", "other"), [("gfx942", FNUZ, FN), ("gfx950", FN, FNUZ)]
)
@pytest.mark.parametrize("variable", ["gfx942;gfx950", "gfx950", "gfx942", ""])
def test_the_encoding_is_the_devices(monkeypatch, arch, own, other, variable):
    monkeypatch.setenv("GPU_ARCHS", variable)
    decoder, step, _ = serve(
        problem_of(dtypes="fp8 fp8"), ("rocm_aiter", amd(arch)), [9, 70]
    )
    assert step.kv_cache.dtype == own
    plan = decoder.plan(step.common)
    wrong = step.kv_cache.float().to(other)
    with pytest.raises(StaleMetadataError) as caught:
        decoder.run(step.q, wrong, plan, softmax_scale=SCALE, **step.scales)
    assert str(other) in caught.value.got
    assert str(own) in caught.value.allowed


@pytest.mark.fault("DTYPE-03")
@pytest.mark.parametrize(("arch", "value"), [("gfx942", 0.5), ("gfx950", 1.0)])
def test_a_byte_means_what_it_means_on_the_device(arch, value):
    problem = problem_of(1, dtypes="fp8 fp8")
    decoder = decoder_of(problem, ("rocm_aiter", amd(arch)))
    step = Step(problem, decoder.device, [1])
    cache = torch.full(step.kv_cache.shape, 0x38, dtype=torch.uint8)
    one = torch.ones(1)
    found = decoder.run(
        step.q,
        cache,
        decoder.plan(step.common),
        softmax_scale=SCALE,
        q_scale=one,
        kv_scale=one,
    )
    assert (found.out == value).all()


@pytest.mark.fault("DTYPE-04")
@pytest.mark.parametrize("dtype", [FN, FNUZ])
@settings(max_examples=40)
@given(value=st.floats(-1e6, 1e6, width=32) | st.sampled_from([-1e-5, 300.0, -500.0]))
def test_what_is_written_is_finite_and_near(dtype, value):
    cache = PagedLatentCache(1, 4, dtype=dtype)
    cache.allocate("a")
    cache.append("a", [torch.full((1, 576), value)])
    stored = cache.layers[0][0, 0]
    largest = torch.finfo(dtype).max
    near = min(max(value, -largest), largest)
    assert stored.float()[0].item() == pytest.approx(near, rel=0.07, abs=2e-3)
    if dtype == FNUZ and abs(value) <= 1e-5:
        assert not stored.view(torch.uint8).any()  # +0: its byte 0x80 would be NaN


@pytest.mark.fault("DTYPE-05")
@pytest.mark.parametrize("name", SERVERS)
def test_a_cache_without_a_scale_takes_none(name):
    decoder, step, _ = serve(problem_of(4), SERVERS[name], [9, 70])
    plan = decoder.plan(step.common)
    for scale in ("kv_scale", "q_scale"):
        with pytest.raises(ArgumentError, match=scale) as caught:
            step.run(decoder, plan, **{scale: torch.tensor([0.5])})
        assert "None, since the tensor is bf16" in caught.value.allowed
    step.check(step.run(decoder, plan))


@pytest.mark.fault("DTYPE-05")
@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_one_scale_dequantises_keys_and_values(name, scale):
    server, dtypes = FP8[name]
    problem = problem_of(16, dtypes=dtypes)
    decoder = decoder_of(problem, server)
    step = Step(problem, decoder.device, [9, 70])
    step.scales["kv_scale"] = torch.tensor([scale])
    step.check(step.run(decoder), atol=0.04 * scale)
    named = inspect.signature(decoder.run).parameters
    assert [n for n in named if n.endswith("_scale")] == [
        "softmax_scale",
        "q_scale",
        "kv_scale",
    ]


@pytest.mark.fault("DTYPE-06")
@pytest.mark.parametrize("name", FP8)
def test_a_scale_that_no_quantiser_gives_is_refused(name):
    server, dtypes = FP8[name]
    decoder = decoder_of(problem_of(16, dtypes=dtypes), server, validate="device")
    step = Step(decoder.problem, decoder.device, [9, 70])
    plan = decoder.plan(step.common)
    for value in (float("nan"), float("inf"), 0.0, -1.0):
        for scale in step.scales:
            with pytest.raises(ArgumentError, match=f"{scale} is not a pos") as caught:
                step.run(decoder, plan, **{scale: torch.tensor([value])})
            assert caught.value.got == repr(value)
    for absent in (None, 0.5, torch.tensor(0.5), torch.ones(2)):
        with pytest.raises(ArgumentError, match="kv_scale does not fit"):
            step.run(decoder, plan, kv_scale=absent)
    step.check(step.run(decoder, plan), atol=0.05)


@pytest.mark.fault("DTYPE-08")
@pytest.mark.parametrize("name", FP8)
def test_an_entry_with_scales_inside_is_no_cache(name):
    server, dtypes = FP8[name]
    decoder = decoder_of(problem_of(16, dtypes=dtypes), server)
    step = Step(decoder.problem, decoder.device, [9, 70])
    plan = decoder.plan(step.common)
    pages = step.kv_cache.shape[0]
    for dtype in (torch.uint8, step.kv_cache.dtype):
        cache = torch.zeros((pages, 64, 656), dtype=torch.uint8).view(dtype)
        with pytest.raises(StaleMetadataError, match=r"\[pages, 64, 576\]"):
            decoder.run(step.q, cache, plan, softmax_scale=SCALE, **step.scales)


def long_tail(server, dtypes, keys=2048):
    """The mean of values that are all one, over one key at 0 and the others at -7."""
    problem = problem_of(2, dtypes=dtypes, max_model_len=keys)
    decoder = decoder_of(problem, server)
    step = Step(problem, decoder.device, [keys])
    q, cache = torch.zeros(step.q.shape), torch.ones(step.kv_cache.shape)
    q[..., 512] = 1.0
    cache[..., 512:] = 0.0
    cache[..., 512] = -7.0
    cache[step.common.block_table_tensor[0, 0], 0, 512] = 0.0
    step.q, step.kv_cache = q.to(step.q.dtype), cache.to(step.kv_cache.dtype)
    scales = dict.fromkeys(step.scales, torch.ones(1))
    return step.run(decoder, softmax_scale=1.0, **scales).out.float()


@pytest.mark.fault("DTYPE-09")
@pytest.mark.parametrize("name", FP8)
def test_a_long_tail_of_small_weights_counts(name):
    found = long_tail(*FP8[name], keys=512 if name == "Triton" else 2048)
    # FlashMLA rounds its weights to fp8 as well, but scaled to fp8's range
    assert (found - 1.0).abs().max() < (0.03 if name == "FlashMLA" else 0.01)


@pytest.mark.fault("DTYPE-09")
def test_the_long_tail_tells_a_kernel_that_rounds_its_weights():
    with simulated("gfx950", faults=Faults(rounds_weights=True), cus=1):
        found = long_tail(("rocm_aiter", amd()), "fp8 fp8")
    assert found.min() < 0.5
    assert 1 / (1 + 2047 * torch.tensor(-7.0).exp()) == pytest.approx(0.34884, abs=1e-4)


@pytest.mark.fault("DTYPE-11")
def test_only_the_arch_that_has_it_is_fnuz():
    for arch in ("gfx942", "gfx950", "gfx90a", "gfx1250", "sm_90", "sm_100", "cpu"):
        expected = FNUZ if arch == "gfx942" else FN
        assert fp8_dtype(DeviceInfo.assume(arch)) == expected
    driver = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", name="")
    found = device_module._describe(driver, index=0, is_rocm=True)
    assert (found.arch, fp8_dtype(found)) == ("gfx942", FNUZ)


@pytest.mark.fault("DTYPE-11")
@pytest.mark.parametrize("arch", ["gfx1250", "gfx949", "gfx9420", "gfx1100"])
def test_an_arch_that_nobody_knows_is_refused(arch):
    problem = problem_of(dtypes="fp8 fp8")
    with pytest.raises(BackendRefused) as caught:
        select(problem, DeviceInfo.assume(arch))
    reasons = caught.value.refused["rocm_aiter"]
    assert [str(reason.code) for reason in reasons] == ["arch"]
    assert reasons[0].got == arch
    assert "gfx942" in reasons[0].allowed
    for unknown in ("", "gfx942:sramecc+:xnack-", "MI300X"):
        with pytest.raises(ArgumentError, match="no known form"):
            MLADecoder(problem, device=DeviceInfo.assume(unknown))
