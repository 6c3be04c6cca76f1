"""The kernel that ends a call, interpreted, and the ways round it."""

import importlib.util
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import triton

from mla_decode_cuda_flashmla import backend, finish_kernel, finishing
from mla_decode_cuda_flashmla.finishing import (
    BLOCK_ROWS,
    Finisher,
    lies_in_order,
    lse_by_torch,
)


@pytest.fixture(scope="module")
def interpreted():
    """The kernel for CPU tensors: Triton decides where it is decorated."""
    spec = importlib.util.spec_from_file_location("interpreted", finish_kernel.__file__)
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module.finish_kernel


class ByAddress:
    """A kernel's launches, which find the tensors behind the addresses."""

    def __init__(self, kernel=None):
        self.kernel, self.grids = kernel, []
        self.known = {0: torch.empty(1, dtype=torch.bfloat16)}

    def directly(self, grid, constants):
        def launch(stream, *addresses):
            self.grids.append(grid)
            tensors = [self.known[address] for address in addresses]
            assert stream == 1
            self.kernel[grid](*tensors, *constants)

        return launch

    def finisher(self):
        return Finisher(dict.fromkeys(BLOCK_ROWS, self))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("rows", [1, 48])
def test_turns_infinity_round_and_copies(interpreted, copies, rows):
    lse = torch.randn(rows)
    lse[::3] = math.inf
    out = torch.randn(rows, 512).bfloat16()
    found = torch.full((rows + 1,), math.nan)
    copied = torch.full((rows + 1, 512), math.nan, dtype=torch.bfloat16)
    block = BLOCK_ROWS[copies]

    interpreted[-(-rows // block), 1, 1](
        lse, found[:rows], out, copied[:rows], rows, copies, block
    )

    want = torch.where(lse == math.inf, -math.inf, lse)
    assert torch.equal(found[:rows], want)
    assert torch.equal(copied[:rows], out) is copies
    assert found[rows].isnan()
    assert copied[rows].isnan().all()


@pytest.mark.parametrize(
    ("query_len", "passes_out", "passes_lse", "names"),
    [
        (2, False, False, ["view", "as_strided", "view"]),
        (2, False, True, ["view", "view"]),
        (2, True, False, ["view", "as_strided"]),
        (2, True, True, ["view"]),
        (1, False, False, ["view", "view", "view"]),
        (1, True, True, ["view"]),
    ],
)
def test_a_later_layer_ends_in_one_kernel(
    operators, kit, interpreted, query_len, passes_out, passes_lse, names
):
    problem = kit.problem(query_lens={query_len}, needs_lse=True)
    step = kit.step(problem, [70, 33, 0], query_len)
    kernel = ByAddress(interpreted)
    builder = backend.builder_cls(problem, kit.assumed())
    builder.finisher = kernel.finisher()
    metadata = builder.build(step.common)
    first = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
    rows = step.q.shape[0]
    given = {}
    if passes_out:
        given["out"] = torch.full((rows, 16, 512), math.nan, dtype=torch.bfloat16)
    if passes_lse:
        given["lse"] = torch.full((rows, 16), math.nan)
    [(key, call)] = metadata.calls.items()
    raw = call(
        q=step.q.view(3, query_len, 16, 576),
        k_cache=step.kv[:, :, None],
        softmax_scale=kit.SCALE,
    )
    metadata.calls[key] = lambda **_: raw
    for tensor in (*raw, *given.values()):
        kernel.known[tensor.data_ptr()] = tensor
    found = []

    def forward():
        found.append(
            backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE, **given)
        )

    assert lies_in_order(raw[1])
    counted = [name for name in operators(forward) if name in {"view", "as_strided"}]
    assert counted == names
    [answer] = found
    assert torch.equal(answer.out, first.out)
    assert torch.equal(answer.lse, first.lse)
    assert len(kernel.grids) == 1
    for name, tensor in given.items():
        assert getattr(answer, name) is tensor


def test_an_answer_in_another_order_takes_torch_s_way_and_is_asked_again(kit):
    problem = kit.problem(query_lens={2}, needs_lse=True)
    step = kit.step(problem, [70, 0], 2)
    builder = backend.builder_cls(problem, kit.assumed())
    builder.finisher = ByAddress().finisher()
    metadata = builder.build(step.common)
    first = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
    [(key, call)] = metadata.calls.items()

    def in_another_order(**words):
        out, lse = call(**words)
        return out, lse.contiguous()

    metadata.calls[key] = in_another_order
    for _ in range(2):
        again = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)
        assert not metadata.finish.takes_answers


def test_an_out_at_an_odd_address_takes_torch_s_way(kit):
    problem = kit.problem(query_lens={1}, needs_lse=True)
    step = kit.step(problem, [70, 0])
    builder = backend.builder_cls(problem, kit.assumed())
    builder.finisher = ByAddress().finisher()
    metadata = builder.build(step.common)
    first = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE)
    odd = torch.empty(2 * 16 * 512 + 1, dtype=torch.bfloat16)[1:].view(2, 16, 512)

    again = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE, out=odd)

    assert again.out is odd
    assert torch.equal(odd, first.out)
    assert torch.equal(again.lse, first.lse)


@pytest.mark.parametrize("given", [False, True])
def test_an_lse_in_another_order_is_put_in_ours(given):
    lse = torch.randn(3, 4, 2)
    lse[1] = math.inf
    target = torch.empty(6, 4) if given else None
    assert not lies_in_order(lse)
    want = torch.where(lse == math.inf, -math.inf, lse).transpose(1, 2).reshape(6, 4)

    found = lse_by_torch(lse, target)

    assert torch.equal(found, want)
    assert not given or found is target


def test_an_assumed_device_has_none_and_says_so(kit):
    problem = kit.problem(needs_lse=True)
    step = kit.step(problem, [70])
    builder = backend.builder_cls(problem, kit.assumed())
    assert builder.finisher is None
    assert "by torch's operators" in builder.build(step.common).facts().path
    builder.finisher = ByAddress().finisher()
    assert "by one kernel of Triton's" in builder.build(step.common).facts().path


def test_a_triton_that_is_too_old_is_not_used(kit, monkeypatch):
    card = replace(kit.assumed(), assumed=False)
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    found, reason = Finisher.of(kit.problem(needs_lse=True), card)
    assert found is None
    assert reason == "no finishing kernel: triton 3.5.1 is too old"


def test_a_kernel_that_cannot_be_compiled_is_a_downgrade(kit, monkeypatch):
    problem = kit.problem(needs_lse=True)

    def fail(_out, _copies):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(finishing, "_compile", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda _index: nullcontext())
    found, reason = Finisher.of(problem, replace(kit.assumed(), assumed=False))
    assert found is None
    step = kit.step(problem, [70])
    builder = backend.builder_cls(problem, kit.assumed())
    builder.no_finisher = reason
    (downgrade,) = builder.build(step.common).facts().downgrades
    assert downgrade.endswith("RuntimeError: Failed to find C compiler.")


def test_the_devices_own_trouble_is_no_downgrade(kit, monkeypatch):
    def fail(_out, _copies):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(finishing, "_compile", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda _index: nullcontext())
    card = replace(kit.assumed(), assumed=False)
    with pytest.raises(torch.OutOfMemoryError):
        Finisher.of(kit.problem(needs_lse=True), card)


def test_nothing_is_compiled_where_no_lse_is_asked_for(kit):
    card = replace(kit.assumed(), assumed=False)
    assert Finisher.of(kit.problem(needs_lse=False), card) == (None, "")
