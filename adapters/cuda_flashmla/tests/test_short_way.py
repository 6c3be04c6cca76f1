"""The short way of known geometry: the same bits, and none of the checks lost."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from mla_decode import ArgumentError, StaleMetadataError
from mla_decode import backend as core
from mla_decode_cuda_flashmla import backend
from mla_decode_cuda_flashmla.capture import EAGER
from mla_decode_cuda_flashmla.finishing import BLOCK_ROWS, Finisher


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
    check = core.check_forward
    monkeypatch.setattr(
        core, "check_forward", lambda *a, **k: calls.append(a) or check(*a, **k)
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
    assert builder.checked_caches.find(extra) is not None
    known = len(builder.checked_caches._checked)
    del extra
    assert len(builder.checked_caches._checked) == known - 1


def test_a_cache_that_moved_is_checked_again(kit, warm, full_checks):
    builder, step, metadata, first = warm
    moved = step.kv.clone()
    step.kv.set_(moved)
    assert builder.checked_caches.find(step.kv) is None
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


def test_an_exchanged_tensor_is_stale_on_the_short_way_too(kit, warm):
    _, step, metadata, _ = warm
    metadata.seq_lens = metadata.seq_lens.clone()
    with pytest.raises(StaleMetadataError, match="exchanged"):
        backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)


@pytest.mark.parametrize(
    ("query_len", "needs_lse", "passes", "names"),
    [
        (2, False, False, ["view", "view"]),
        (2, False, True, ["view", "view", "copy_"]),
        (1, True, False, ["view", "view", "as_strided", "nan_to_num_"]),
        (2, True, False, ["view", "view", "as_strided", "nan_to_num_"]),
        (2, True, True, ["view", "view", "copy_", "as_strided", "nan_to_num"]),
    ],
)
def test_a_later_layer_asks_torch_for_views_and_one_kernel_an_output(
    operators, kit, query_len, needs_lse, passes, names
):
    """Counted beside a library that returns at once."""
    problem = kit.problem(query_lens={query_len}, needs_lse=needs_lse)
    step = kit.step(problem, [70, 33, 9], query_len)
    builder = backend.builder_cls(problem, kit.assumed())
    given = outputs(step) if passes else {}
    if not needs_lse:
        given.pop("lse", None)
    metadata = builder.build(step.common)
    first = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
    raw = (
        torch.zeros(3, query_len, 16, 512, dtype=torch.bfloat16),
        torch.zeros(3, query_len, 16).transpose(1, 2),
    )
    metadata.calls[EAGER] = lambda **_: raw
    found = []

    def forward():
        found.append(
            backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE, **given)
        )

    assert operators(forward) == names
    [found] = found
    assert found.out.shape == first.out.shape


class StillKernel:
    """Launches that return at once."""

    def directly(self, _grid, _constants):
        return lambda *_: None


@pytest.mark.parametrize(
    ("needs_lse", "passes", "most"),
    [(False, False, 17), (True, False, 20), (True, True, 26)],
)
def test_a_later_layer_calls_no_more_than_it_must(kit, needs_lse, passes, most):
    """Functions entered, Python's and C's: each takes 50 to 500 ns on the host."""
    problem = kit.problem(query_lens={2}, needs_lse=needs_lse)
    step = kit.step(problem, [70, 33, 9], 2)
    builder = backend.builder_cls(problem, kit.assumed())
    if needs_lse:
        builder.finisher = Finisher(dict.fromkeys(BLOCK_ROWS, StillKernel()))
    metadata = builder.build(step.common)
    given = outputs(step) if passes else {}
    raw = (
        torch.zeros(3, 2, 16, 512, dtype=torch.bfloat16),
        torch.zeros(3, 2, 16).transpose(1, 2),
    )
    entered = []

    def note(frame, event, function):
        if event == "call":
            entered.append(frame.f_code.co_name)
        elif event == "c_call" and function is not sys.setprofile:
            entered.append(function.__name__)

    for count in range(3):
        if count == 1:  # the first layer plans
            metadata.calls[EAGER] = lambda **_: raw
        previous = sys.getprofile()
        if count == 2:  # the second looks at what the library answers
            sys.setprofile(note)
        backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE, **given)
        sys.setprofile(previous)
    assert len(entered) <= most
