"""The clauses SCALE, STALE, OUT, DTYPE and VALIDATE of a forward call."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mla_decode import ArgumentError, StaleMetadataError


@pytest.fixture
def planned(make_step, plain_builder, cpu):
    """A function from step fields to (step, its current metadata)."""

    def plan(**fields):
        step = make_step(**{"seq_lens": (9, 9), "query_len": 2, **fields})
        return step, plain_builder(step.problem, cpu).build(step.common)

    return plan


def call(backend, step, metadata, **changes):
    arguments = {"q": step.q, "kv_cache": step.kv_cache, **step.arguments, **changes}
    return backend.forward(metadata=metadata, **arguments)


def test_outputs_are_allocated_or_the_callers_own(plain_backend, planned):
    step, metadata = planned(needs_lse=True)
    output = call(plain_backend, step, metadata)
    assert output.out.shape == (4, 2, 512)
    assert output.out.dtype == torch.bfloat16
    assert output.lse.shape == (4, 2)
    assert output.lse.dtype == torch.float32
    out, lse = torch.empty_like(output.out), torch.empty_like(output.lse)
    filled = call(plain_backend, step, metadata, out=out, lse=lse)
    assert filled.out is out
    assert filled.lse is lse
    assert out.eq(4).all()


def test_without_need_there_is_no_lse_and_none_may_be_passed(plain_backend, planned):
    step, metadata = planned(needs_lse=False)
    assert call(plain_backend, step, metadata).lse is None
    with pytest.raises(ArgumentError, match="does not ask for it"):
        call(plain_backend, step, metadata, lse=torch.empty(4, 2))


@pytest.mark.parametrize(
    "scale",
    [None, 0.0, -0.1, 1, True, float("nan"), float("inf"), "1", torch.tensor(0.1)],
    ids=repr,
)
def test_softmax_scale_is_a_positive_finite_float(plain_backend, planned, scale):
    step, metadata = planned()
    call(plain_backend, step, metadata)  # a checked geometry does not excuse a scale
    with pytest.raises(ArgumentError) as caught:
        call(plain_backend, step, metadata, softmax_scale=scale)
    assert "192**-0.5" in caught.value.fix


def test_softmax_scale_has_no_default(plain_backend, planned):
    step, metadata = planned()
    with pytest.raises(TypeError, match="softmax_scale"):
        plain_backend.forward(step.q, step.kv_cache, metadata)


def test_a_numpy_float_is_a_float(plain_backend, planned):
    step, metadata = planned()
    call(plain_backend, step, metadata, softmax_scale=np.float64(0.1))


@pytest.mark.parametrize(
    "scale",
    [
        None,
        1.25,
        torch.tensor(1.0),
        torch.ones(1).double(),
        torch.ones(2),
        torch.empty(1, device="meta"),
    ],
    ids=repr,
)
def test_an_fp8_cache_needs_its_scale_as_a_device_tensor(plain_backend, planned, scale):
    step, metadata = planned(kv_dtype="fp8")
    call(plain_backend, step, metadata)
    with pytest.raises(ArgumentError, match="kv_scale does not fit") as caught:
        call(plain_backend, step, metadata, kv_scale=scale)
    assert caught.value.allowed == "float32 [1] on cpu"


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
def test_a_scale_without_fp8_is_refused(plain_backend, planned, name):
    step, metadata = planned()
    with pytest.raises(ArgumentError, match=f"{name} does not fit") as caught:
        call(plain_backend, step, metadata, **{name: torch.ones(1)})
    assert "None, since the tensor is bf16" in caught.value.allowed


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_device_validation_reads_the_scales_of_every_call(
    plain_backend, plain_builder, make_step, cpu, value
):
    step = make_step(seq_lens=(9, 9), query_len=2, kv_dtype="fp8")
    metadata = plain_builder(step.problem, cpu, validate="device").build(step.common)
    call(plain_backend, step, metadata)
    with pytest.raises(ArgumentError, match="kv_scale is not a positive") as caught:
        call(plain_backend, step, metadata, kv_scale=torch.tensor([value]))
    assert "quantised with" in caught.value.fix


def test_an_fp8_cache_may_arrive_as_bytes(plain_backend, planned):
    step, metadata = planned(kv_dtype="fp8")
    call(plain_backend, step, metadata, kv_cache=step.kv_cache.view(torch.uint8))
    seen = plain_backend.last_call.kv_cache
    assert seen.dtype == torch.float8_e4m3fn
    assert seen.data_ptr() == step.kv_cache.data_ptr()


def test_bytes_are_no_bf16_cache(plain_backend, planned):
    step, metadata = planned()
    raw = torch.zeros(step.kv_cache.shape, dtype=torch.uint8)
    with pytest.raises(StaleMetadataError, match="kv_cache"):
        call(plain_backend, step, metadata, kv_cache=raw)


SPOILT_QUERIES = {
    "a list": lambda q: q.tolist(),
    "fewer rows": lambda q: q[:-1],
    "more heads": lambda q: q.repeat(1, 2, 1),
    "latent alone": lambda q: q[..., :512],
    "fp16": lambda q: q.half(),
    "elsewhere": lambda q: q.to("meta"),
    "a lone tuple": lambda q: (q,),
    "a triple": lambda q: (q[..., :512], q[..., 512:], q),
    "a pair with a hole": lambda q: (q[..., :512], None),
    "a pair of rope and nope": lambda q: (q[..., 512:], q[..., :512]),
}


@pytest.mark.parametrize("spoil", SPOILT_QUERIES.values(), ids=SPOILT_QUERIES)
def test_a_query_of_another_geometry_is_stale(plain_backend, planned, spoil):
    step, metadata = planned()
    pair = (step.q[..., :512], step.q[..., 512:])
    for good in (step.q, pair, step.q):
        call(plain_backend, step, metadata, q=good)
        with pytest.raises(StaleMetadataError) as caught:
            call(plain_backend, step, metadata, q=spoil(step.q))
        assert caught.value.fix


def test_a_query_is_contiguous_in_its_last_axis(plain_backend, planned):
    step, metadata = planned()
    spread = step.q.repeat_interleave(2, dim=-1)[..., ::2]
    with pytest.raises(ArgumentError, match="last axis"):
        call(plain_backend, step, metadata, q=spread)


def test_a_query_may_be_a_view_of_a_larger_tensor(plain_backend, planned):
    step, metadata = planned()
    wide = torch.zeros((4, 5, 600), dtype=torch.bfloat16)
    call(plain_backend, step, metadata, q=wide[:, 1:3, 4:580])


def test_a_pair_is_joined_where_the_backend_takes_no_pairs(plain_backend, planned):
    step, metadata = planned()
    call(plain_backend, step, metadata, q=(step.q[..., :512], step.q[..., 512:]))
    assert torch.equal(plain_backend.last_call.q, step.q)
    assert plain_backend.last_call.q_rope is None


def test_a_pair_is_handed_on_to_a_backend_that_takes_pairs(plain_backend_cls, planned):
    backend = type("Pairs", (plain_backend_cls,), {"takes_query_pair": True})()
    step, metadata = planned()
    nope, rope = step.q[..., :512], step.q[..., 512:]
    call(backend, step, metadata, q=(nope, rope))
    assert backend.last_call.q is nope
    assert backend.last_call.q_rope is rope
    call(backend, step, metadata)
    assert backend.last_call.q_rope is None


SPOILT_CACHES = {
    "a list": lambda c: c.tolist(),
    "flat": lambda c: c.flatten(0, 1),
    "other pages": lambda c: c.reshape(-1, 8, 576),
    "latent alone": lambda c: c[..., :512],
    "fp16": lambda c: c.half(),
    "elsewhere": lambda c: c.to("meta"),
    "gapped pages": lambda c: torch.cat([c, c], 1).as_strided(
        c.shape, (2 * 16 * 576, 576, 1)
    ),
    "gapped rows": lambda c: torch.cat([c, c], 2)[..., :576],
    "gapped numbers": lambda c: torch.cat([c, c], 2)[..., ::2],
}


@pytest.mark.parametrize("spoil", SPOILT_CACHES.values(), ids=SPOILT_CACHES)
def test_a_cache_of_another_geometry_is_stale(plain_backend, planned, spoil):
    step, metadata = planned()
    call(plain_backend, step, metadata)
    with pytest.raises(StaleMetadataError, match="kv_cache"):
        call(plain_backend, step, metadata, kv_cache=spoil(step.kv_cache))


def test_the_declared_page_stride_is_the_one_that_is_taken(plain_backend, planned):
    step, metadata = planned(page_gap=64)
    call(plain_backend, step, metadata)
    with pytest.raises(StaleMetadataError) as caught:
        call(plain_backend, step, metadata, kv_cache=step.kv_cache.contiguous())
    assert caught.value.allowed == f"strides ({16 * 576 + 64}, 576, 1)"


def test_a_single_page_and_single_row_have_no_stride_to_speak_of(
    plain_backend, planned
):
    step, metadata = planned(seq_lens=(1, 1), query_len=1, page_size=1)
    wide = torch.zeros((1, 1, 900), dtype=torch.bfloat16)[..., :576]
    call(plain_backend, step, metadata, kv_cache=wide)


SPOILT_OUTPUTS = {
    "a list": ("out", lambda out: out.tolist()),
    "fp32": ("out", lambda out: out.float()),
    "fewer rows": ("out", lambda out: out[:-1]),
    "strided": ("out", lambda out: torch.cat([out, out], 2)[..., :512]),
    "elsewhere": ("out", lambda out: out.to("meta")),
    "a bf16 lse": ("lse", lambda out: out[..., 0].contiguous()),
    "a flat lse": ("lse", lambda out: out.new_zeros(8).float()),
}


@pytest.mark.parametrize(("name", "spoil"), SPOILT_OUTPUTS.values(), ids=SPOILT_OUTPUTS)
def test_an_output_that_cannot_be_filled_in_place_is_refused(
    plain_backend, planned, name, spoil
):
    step, metadata = planned(needs_lse=True)
    out = torch.zeros((4, 2, 512), dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=f"{name} cannot be filled"):
        call(plain_backend, step, metadata, **{name: spoil(out)})
    assert not out.any()


def test_metadata_of_an_earlier_build_is_stale_even_for_a_known_geometry(
    plain_backend, planned
):
    step, metadata = planned()
    call(plain_backend, step, metadata)
    metadata.builder.build(step.common)
    with pytest.raises(StaleMetadataError, match="newest"):
        call(plain_backend, step, metadata)


@pytest.mark.parametrize("name", ["block_table", "seq_lens", "query_start_loc"])
def test_metadata_whose_tensor_was_exchanged_is_stale(plain_backend, planned, name):
    step, metadata = planned()
    call(plain_backend, step, metadata)
    setattr(metadata, name, getattr(metadata, name).clone())
    with pytest.raises(StaleMetadataError, match="exchanged") as caught:
        call(plain_backend, step, metadata)
    assert "call build" in caught.value.fix


@pytest.mark.parametrize("metadata", [None, 3, "metadata"])
def test_what_no_build_returned_is_no_metadata(plain_backend, planned, metadata):
    step, _ = planned()
    with pytest.raises(StaleMetadataError, match="nothing that a build returned"):
        plain_backend.forward(step.q, step.kv_cache, metadata, **step.arguments)


def test_all_layers_of_a_step_share_one_metadata(plain_backend, planned):
    step, metadata = planned()
    for layer in range(3):
        q = step.q + layer
        cache = step.kv_cache.clone()
        call(plain_backend, step, metadata, q=q, kv_cache=cache)
        assert plain_backend.last_call.q is q
        assert plain_backend.last_call.kv_cache is cache


def test_metadata_of_another_backend_is_stale_even_for_a_known_geometry(
    plain_backend, plain_backend_cls, plain_builder, planned
):
    other_builder = type("OtherBuilder", (plain_builder,), {})
    other = type("Other", (plain_backend_cls,), {"builder_cls": other_builder})()
    step, metadata = planned()
    call(plain_backend, step, metadata)
    with pytest.raises(StaleMetadataError) as caught:
        call(other, step, metadata)
    assert (caught.value.got, caught.value.allowed) == ("PlainBuilder", "OtherBuilder")


def test_nothing_is_written_before_the_call_has_passed(plain_backend, planned):
    step, metadata = planned(needs_lse=True)
    out = torch.zeros((4, 2, 512), dtype=torch.bfloat16)
    with pytest.raises(ArgumentError):
        call(plain_backend, step, metadata, out=out, lse=torch.zeros(1))
    assert not out.any()


def test_the_dtypes_are_the_problems_own(plain_backend, planned):
    step, metadata = planned(q_dtype="fp32", kv_dtype="fp16", out_dtype="fp16")
    assert call(plain_backend, step, metadata).out.dtype == torch.float16
    half = replace(step, q=step.q.half())
    with pytest.raises(StaleMetadataError) as caught:
        call(plain_backend, half, metadata)
    assert "float32" in caught.value.allowed
