"""Launches past Triton's front door: what the driver gets, and when Triton makes them."""

import math
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel, LazyDict
from triton.knobs import HookChain

from mla_decode import detect_device
from mla_decode_cuda_flashmla.finishing import BLOCK_ROWS, Finisher
from mla_decode_cuda_flashmla.launching import Launcher

GRID, CONSTANTS = (3, 1, 1), (41, True, 8)
ADDRESSES = 1024, 1025, 2048, 4096


class Launched(list):
    """The driver's end of a launch: keeps what it was called with."""

    def __call__(self, *given):
        if isinstance(given[-1], tuple):  # since 3.7 a kernel's arguments are one
            given = *given[:-1], *given[-1]
        self.append(given)

    def without_hooks(self):
        """The launches without what Triton makes for hooks, set or not."""
        hooks = LazyDict, HookChain, type(None)
        return [
            [value for value in given if not isinstance(value, hooks)] for given in self
        ]


@pytest.fixture
def launched():
    return Launched()


@pytest.fixture
def compiled(monkeypatch, launched):
    """Triton's own kernel and launcher, loaded, above a driver that only listens."""
    active = SimpleNamespace(
        get_current_device=lambda: 1, get_current_stream=lambda device: 70 + device
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    launcher = object.__new__(nvidia.CudaLauncher)
    vars(launcher).update(
        launch=launched,
        num_ctas=1,
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=False,
        gsan_enabled=False,
        arg_annotations=("annotated",),
        kernel_signature=b"signed",
    )
    kernel = object.__new__(CompiledKernel)
    vars(kernel).update(
        metadata=SimpleNamespace(),
        packed_metadata=(4, 1, 1000),
        src=None,
        name="kernel",
        module="loaded",
        _module_pid=None,
        function=1234,
        _run=launcher,
    )
    return kernel


def test_the_driver_gets_what_triton_gives_it(compiled, launched):
    kernel = Launcher(compiled)
    assert kernel.is_direct
    kernel.by_triton(GRID, CONSTANTS)(71, *ADDRESSES)
    kernel.directly(GRID, CONSTANTS)(71, *ADDRESSES)
    by_triton, directly = launched.without_hooks()
    assert directly == by_triton
    assert directly[:5] == [*GRID, 71, 1234]
    assert directly[-7:] == [*ADDRESSES, *CONSTANTS]
    assert all(hook not in launched[1] for hook in hooks())


def test_the_stream_is_the_caller_s(compiled, launched):
    launch = Launcher(compiled).directly(GRID, CONSTANTS)
    for stream in (0, 5):
        launch(stream, *ADDRESSES)
    assert [given[3] for given in launched] == [0, 5]


def test_a_profiler_that_listens_at_a_build_hears(compiled, launched, monkeypatch):
    finisher = Finisher(dict.fromkeys(BLOCK_ROWS, Launcher(compiled)))
    enter = triton.knobs.runtime.launch_enter_hook
    silent = finisher.for_batch(3, 16)
    monkeypatch.setattr(enter, "calls", [print])
    heard = finisher.for_batch(3, 16)
    monkeypatch.setattr(enter, "calls", [])
    assert finisher.for_batch(3, 16) is silent
    for finish in (silent, heard):
        finish.copy(71, *ADDRESSES)
    assert [enter in given for given in launched] == [False, True]
    assert launched.without_hooks()[0] == launched.without_hooks()[1]


@pytest.mark.parametrize("hook", [None, print])
def test_a_hook_that_is_no_chain_is_one_unless_it_is_none(
    compiled, launched, monkeypatch, hook
):
    finisher = Finisher(dict.fromkeys(BLOCK_ROWS, Launcher(compiled)))
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)
    finisher.for_batch(3, 16).mark(71, *ADDRESSES)
    assert (print in launched[0]) is (hook is print)


def test_a_launch_covers_the_batch(compiled, launched):
    finisher = Finisher(dict.fromkeys(BLOCK_ROWS, Launcher(compiled)))
    finish = finisher.for_batch(5, 206)
    finish.mark(71, *ADDRESSES)
    finish.copy(71, *ADDRESSES)
    assert [given[:3] for given in launched] == [(3, 1, 1), (129, 1, 1)]
    assert [given[-3:] for given in launched] == [(1030, False, 512), (1030, True, 8)]


def other_launcher(compiled, _):
    compiled._run = Launched()
    return compiled._run


def other_call(_, monkeypatch):
    def __call__(self, *given):  # noqa: N807 - theirs
        call(self, *given)

    call = nvidia.CudaLauncher.__call__
    monkeypatch.setattr(nvidia.CudaLauncher, "__call__", __call__)


def turned(monkeypatch, launch):
    """A launcher whose call looks as it should, and passes things otherwise."""

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):  # noqa: N807, N803 - theirs
        launch(self.launch, (gridX, gridY, gridZ), stream, function, args)

    monkeypatch.setattr(nvidia.CudaLauncher, "__call__", __call__)


def other_order(_, monkeypatch):
    turned(monkeypatch, lambda to, grid, stream, _, args: to(stream, *grid, *args))


def more_than_known(_, monkeypatch):
    turned(
        monkeypatch,
        lambda to, grid, stream, function, args: to(
            *grid, stream, function, *range(20), *args
        ),
    )


def two_launches(_, monkeypatch):
    def twice(to, grid, stream, function, args):
        for _ in range(2):
            to(*grid, stream, function, *args)

    turned(monkeypatch, twice)


def looks_at_the_stream(_, monkeypatch):
    turned(monkeypatch, lambda to, grid, stream, *_: to(*grid, int(stream)))


@pytest.mark.parametrize(
    "make_other",
    [
        *(other_launcher, other_call, other_order),
        *(more_than_known, two_launches, looks_at_the_stream),
    ],
)
def test_an_unknown_launcher_is_left_to_triton(
    compiled, launched, monkeypatch, make_other
):
    launched = make_other(compiled, monkeypatch) or launched
    kernel = Launcher(compiled)
    assert not kernel.is_direct
    before = len(launched)
    run = []
    monkeypatch.setattr(
        CompiledKernel, "__getitem__", lambda _, grid: lambda *a: run.append((grid, a))
    )
    kernel.directly(GRID, CONSTANTS)(71, *ADDRESSES)
    assert run == [(GRID, (*ADDRESSES, *CONSTANTS))]
    assert len(launched) == before


@pytest.mark.parametrize(
    "work", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"]
)
def test_a_launcher_with_more_to_do_is_left_to_triton(compiled, work):
    setattr(compiled._run, work, 1)
    assert not Launcher(compiled).is_direct


def test_a_launcher_that_does_not_say_its_scratch_is_left_to_triton(compiled):
    del compiled._run.global_scratch_size
    assert not Launcher(compiled).is_direct


@pytest.mark.cuda
@pytest.mark.parametrize("copies", [False, True])
def test_a_direct_launch_gives_the_bits_of_triton_s(kit, copies):
    device = detect_device()
    finisher, reason = Finisher.of(kit.problem(needs_lse=True), device)
    assert reason == ""
    kernel = finisher._kernels[copies]
    assert kernel.is_direct
    rows = 1030
    torch.manual_seed(0)
    lse = torch.randn(rows, device="cuda")
    lse[::7] = math.inf
    out = torch.randn(rows, 512, device="cuda").bfloat16()
    block = BLOCK_ROWS[copies]
    grid, constants = (-(-rows // block), 1, 1), (rows, copies, block)
    answers = []
    for way in (kernel.by_triton, kernel.directly):
        to = torch.full_like(lse, math.nan), torch.full_like(out, math.nan)
        stream = torch.cuda.current_stream().cuda_stream
        tensors = lse, to[0], out, to[1]
        way(grid, constants)(stream, *(tensor.data_ptr() for tensor in tensors))
        torch.cuda.synchronize()
        answers.append(to)
    (by_triton, copied), (directly, also_copied) = answers
    assert torch.equal(directly, torch.where(lse == math.inf, -math.inf, lse))
    assert torch.equal(directly, by_triton)
    assert torch.equal(also_copied.view(torch.int16), copied.view(torch.int16))
    assert torch.equal(also_copied, out) is copies


def hooks():
    runtime = triton.knobs.runtime
    return runtime.launch_enter_hook, runtime.launch_exit_hook
