"""Which stream a call runs on, and when it must ask whether that is being captured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mla_decode_cuda_flashmla import backend
from mla_decode_cuda_flashmla.capture import UNCAPTURABLE, stream_getter


@pytest.mark.parametrize(("stream", "asked"), [(UNCAPTURABLE, 0), (7, 1)])
def test_only_a_stream_that_can_be_captured_is_asked(kit, stream, asked):
    problem = kit.problem()
    step = kit.step(problem, [70])
    builder = backend.builder_cls(problem, kit.assumed())
    metadata = builder.build(step.common)
    first = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
    questions = []
    builder.stream_of = lambda _number: stream
    builder.is_capturing = lambda: questions.append("capturing?")
    again = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
    assert torch.equal(again.out, first.out)
    assert len(questions) == asked


def test_a_stream_is_found_the_short_way_or_the_public_one(kit, monkeypatch):
    card = replace(kit.assumed(), assumed=False)
    streams = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "current_stream", {3: streams}.get)
    raw = {3: 4}.get
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
    assert stream_getter(card)(3) == 4
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    assert stream_getter(card)(3) == 5
    assert stream_getter(kit.assumed())(3) != UNCAPTURABLE


@pytest.mark.cuda
def test_the_default_stream_is_the_one_that_cannot_be_captured(kit):
    stream_of = stream_getter(replace(kit.assumed(), assumed=False))
    here = torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.default_stream()):
        assert stream_of(here) == UNCAPTURABLE
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert stream_of(here) == side.cuda_stream != UNCAPTURABLE
