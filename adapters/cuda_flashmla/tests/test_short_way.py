"""The short way of known geometry: the same bits, and none of the checks lost."""

import math
from dataclasses import replace

import pytest
import torch

from mla_decode import ArgumentError, StaleMetadataError
from mla_decode_cuda_flashmla import backend, forward


@pytest.fixture
def warm(kit):
    """A builder, its step and metadata after a first, fully checked call."""
    problem = kit.problem(query_lens={2}, needs_lse=True)
    step = kit.step(problem, [70, 33, 0], 2)
    builder = backend.builder_cls(problem, kit.assumed())
    metadata = builder.build(step.common)
    first = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
    return builder, step, metadata, first


@pytest.fixture
def full_checks(monkeypatch):
    calls = []
    check = forward.check_forward
    monkeypatch.setattr(
        forward, "check_forward", lambda *a, **k: calls.append(a) or check(*a, **k)
    )
    return calls


def outputs(step, dtype=torch.bfloat16):
    rows = step.q.shape[0]
    out = torch.full((rows, 16, 512), math.nan, dtype=dtype)
    return {"out": out, "lse": torch.full((rows, 16), math.nan)}


def test_later_layers_take_it_and_get_the_same_bits(kit, warm, full_checks):
    _, step, metadata, first = warm
    given = outputs(step)
    for kept in ({}, given):
        again = backend.forward(
            step.q.clone(), step.kv, metadata, softmax_scale=kit.SCALE, **kept
        )
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)
    assert again.out is given["out"]
    assert again.lse is given["lse"]
    assert full_checks == []


def test_a_later_step_takes_it_too(kit, warm, full_checks):
    builder, step, _, first = warm
    later = builder.build(step.common)
    again = backend.forward(step.q, step.kv, later, softmax_scale=kit.SCALE)
    assert torch.equal(again.out, first.out)
    assert full_checks == []


def test_an_unknown_cache_or_layout_is_checked_in_full(kit, warm, full_checks):
    _, step, metadata, first = warm
    strided = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    for q, kv in ((step.q, step.kv.clone()), (strided, step.kv)):
        again = backend.forward(q, kv, metadata, softmax_scale=kit.SCALE)
        assert torch.equal(again.out, first.out)
    assert len(full_checks) == 2


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -0.1, 1, True])
def test_a_scale_that_is_none_is_still_refused(warm, scale):
    _, step, metadata, _ = warm
    with pytest.raises(ArgumentError, match="softmax_scale"):
        backend.forward(step.q, step.kv, metadata, softmax_scale=scale)


def test_another_geometry_is_still_stale(kit, warm):
    builder, step, metadata, _ = warm
    wrong = (
        (step.q[:4], step.kv),
        (step.q.half(), step.kv),
        (step.q, step.kv.half()),
        (step.q, step.kv[:, :32]),
    )
    for q, kv in wrong:
        with pytest.raises(StaleMetadataError):
            backend.forward(q, kv, metadata, softmax_scale=kit.SCALE)
    builder.build(step.common)
    with pytest.raises(StaleMetadataError):
        backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)


def test_outputs_that_cannot_be_filled_are_still_refused(kit, warm):
    _, step, metadata, _ = warm
    good = outputs(step)
    for wrong in (
        {"out": good["out"].half()},
        {"out": good["out"][:2]},
        {"lse": good["lse"].double()},
        {"lse": good["lse"].t()},
        {"kv_scale": torch.ones(1)},
    ):
        with pytest.raises(ArgumentError):
            backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE, **wrong)


def test_the_builder_keeps_no_cache_of_the_engine_alive(kit, warm):
    builder, step, metadata, _ = warm
    extra = step.kv.clone()
    backend.forward(step.q, extra, metadata, softmax_scale=kit.SCALE)
    assert extra in builder.checked_caches
    known = len(builder.checked_caches._checked)
    del extra
    assert len(builder.checked_caches._checked) == known - 1


def test_a_cache_that_moved_is_checked_again(kit, warm, full_checks):
    builder, step, metadata, first = warm
    moved = step.kv.clone()
    step.kv.set_(moved)
    assert step.kv not in builder.checked_caches
    again = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
    assert torch.equal(again.out, first.out)
    assert len(full_checks) == 1


def test_validation_on_the_device_never_takes_it(kit, full_checks):
    problem = kit.problem()
    step = kit.step(problem, [70])
    builder = backend.builder_cls(problem, kit.assumed(), validate="device")
    metadata = builder.build(step.common)
    for _ in range(2):
        backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
    assert len(full_checks) == 2
    short = replace(step, kv=step.kv[: metadata.last_page])
    with pytest.raises(ValueError, match="past the cache"):
        backend.forward(short.q, short.kv, metadata, softmax_scale=kit.SCALE)
