"""The Hopper kernel behind the contract, as far as it goes without a GPU."""

import ctypes
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import hopper_simulator
import pytest
import torch
from triton_steps import SCALE, make_step, relative_error

from mla_decode import ArgumentError, BackendRefused, DecodeProblem, DeviceInfo, Mask
from mla_decode.workspace import core_bytes, held_bytes
from mla_decode_triton import TritonMLABackend, chosen_backend
from mla_decode_triton.hopper import capability, grid
from mla_decode_triton.hopper.grid import WorkspaceSize, count_multiprocessors
from mla_decode_triton.kernel_choice import BACKENDS

SM_90 = DeviceInfo.assume("sm_90")
CARD = DeviceInfo(vendor="cuda", arch="sm_90")
hopper = chosen_backend("hopper")


def problem_of(**fields):
    fields = {"num_q_heads": 16, "page_size": 64, "max_num_reqs": 64, **fields}
    return DecodeProblem(**fields)


def codes(device=SM_90, **fields):
    return [str(r.code) for r in hopper.refusals(problem_of(**fields), device)]


def test_all_of_them_have_one_name_and_the_portable_one_is_plain():
    assert type(chosen_backend("portable")) is TritonMLABackend
    assert {chosen_backend(kernel).name for kernel in BACKENDS} == {"triton_mla"}


@pytest.mark.parametrize(
    ("value", "kernel"),
    [("", "auto"), ("portable", "portable"), ("hopper", "hopper"), (" auto ", "auto")],
)
def test_the_environment_chooses(monkeypatch, value, kernel):
    monkeypatch.setenv("MLA_DECODE_TRITON_KERNEL", value)
    assert type(chosen_backend()) is BACKENDS[kernel]


def test_unasked_each_problem_has_the_kernel_that_can(monkeypatch):
    monkeypatch.delenv("MLA_DECODE_TRITON_KERNEL", raising=False)
    assert type(chosen_backend()) is BACKENDS["auto"]


def test_refuses_a_kernel_of_another_name(monkeypatch):
    monkeypatch.setenv("MLA_DECODE_TRITON_KERNEL", "fastest")
    with pytest.raises(ArgumentError, match="portable, hopper, auto"):
        chosen_backend()


@pytest.mark.parametrize("kernel", ["hopper", "auto"])
def test_importing_and_asking_it_loads_no_triton(kernel):
    script = (
        "import sys\n"
        "from mla_decode import DecodeProblem, DeviceInfo\n"
        "from mla_decode_triton import backend\n"
        "problem = DecodeProblem(num_q_heads=16)\n"
        "device = DeviceInfo.assume('sm_90')\n"
        "backend.refusals(problem, device), backend.cost(problem, device)\n"
        "gpu = 'torch' in sys.modules and sys.modules['torch'].cuda.is_initialized()\n"
        "print(type(backend).__name__, 'triton' in sys.modules, gpu)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "MLA_DECODE_TRITON_KERNEL": kernel},
        check=True,
    )
    assert done.stdout == f"{BACKENDS[kernel].__name__} False False\n"


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_serves_what_the_portable_kernel_does(page_size, dtype):
    for num_q_heads, query_len in [(1, 1), (128, 32), (5, 3)]:
        assert not codes(
            num_q_heads=num_q_heads,
            q_dtype=dtype,
            kv_dtype=dtype,
            page_size=page_size,
            query_lens=frozenset({query_len}),
            masks=frozenset(Mask),
            needs_lse=True,
            graphs=True,
        )


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"page_size": 1}, "page_size"),
        ({"max_num_reqs": 1025}, "feature"),
        ({"max_splits": 4}, "feature"),
        ({"batch_invariant": True}, "determinism"),
        ({"kv_page_stride": 64 * 576 + 4}, "feature"),
    ],
)
def test_refuses_what_it_lacks(fields, code):
    assert code in codes(**fields)


@pytest.mark.parametrize("query_len", [1, 2, 3, 32])
def test_serves_fp8_caches_for_any_number_of_rows(query_len):
    assert not codes(kv_dtype="fp8", query_lens=frozenset({query_len}))


@pytest.mark.parametrize("arch", ["sm_100", "sm_80", "gfx942"])
def test_refuses_every_other_architecture(arch):
    device = DeviceInfo.assume(arch)
    assert codes(device) == ["arch"]
    assert not hopper.supports_non_causal(device)


@pytest.mark.parametrize(
    ("version", "refused"),
    [("3.5.1", True), ("3.6.0", False), ("3.10.0", False), (None, True)],
)
def test_refuses_a_triton_without_its_gluon(monkeypatch, version, refused):
    monkeypatch.setattr(capability, "installed_triton", lambda: version)
    assert codes(CARD) == (["dependency"] if refused else [])


def test_reads_the_installed_triton_or_that_there_is_none(monkeypatch):
    read = capability.installed_triton.__wrapped__
    monkeypatch.setattr(metadata, "version", {"triton": "3.7.1"}.__getitem__)
    assert read() == "3.7.1"

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert read() is None


@pytest.mark.parametrize("query_lens", [{1}, {1, 2, 4}, {32}])
def test_the_workspace_is_as_large_as_the_cost_says(query_lens):
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")
    from mla_decode_triton.hopper.backend import workspace_size
    from mla_decode_triton.hopper.workspace import Workspace

    problem = problem_of(query_lens=frozenset(query_lens))
    held = Workspace.allocate(workspace_size(problem, SM_90), torch.device("cpu"))
    tensors = held.schedule, held.scratch, held.partial_out, held.partial_lse
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    assert hopper.cost(problem, SM_90).workspace_bytes == num_bytes


def test_a_card_is_asked_for_its_multiprocessors(monkeypatch):
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(multi_processor_count=114)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    card = DeviceInfo(vendor="cuda", arch="sm_90", index=63)  # no other test's
    problem = problem_of(query_lens=frozenset({4}))
    assert count_multiprocessors(SM_90) == 132
    assert hopper.cost(problem, card) == replace(
        hopper.cost(problem, SM_90),
        workspace_bytes=WorkspaceSize.of([64], problem.max_num_reqs, 114).num_bytes,
    )
    assert count_multiprocessors(card) == 114
    assert asked == [63]


def test_a_builder_and_its_steps_are_laid_over_as_many_as_the_cost_counts(monkeypatch):
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")
    monkeypatch.setattr(grid, "H200_MULTIPROCESSORS", 78)
    problem = problem_of(query_lens=frozenset({1, 4}))
    builder = hopper.builder_cls(problem, SM_90)
    assert {step.multiprocessors for step in builder.steps.values()} == {78}
    held = held_bytes(builder) - core_bytes(problem, joins=False)
    assert held == hopper.workspace_bytes(problem, SM_90)


def test_steps_share_one_workspace_that_each_fits():
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")
    problem = problem_of(query_lens=frozenset({1, 3, 32}))
    builder = hopper.builder_cls(problem, SM_90)
    assert len({id(step.workspace) for step in builder.steps.values()}) == 1
    laid_out = [(1, 16), (3, 16), (3, 64), (32, 16), (32, 64)]
    assert sorted(builder.steps) == laid_out
    for (query_len, rows), step in builder.steps.items():
        assert (step.num_rows, step.grid.rows) == (16 * query_len, rows)
        grid, held_rows = step.grid, step.workspace.partial_out.shape[0]
        assert grid.partial_rows(step.num_rows) <= held_rows
        assert grid.schedule_entries <= step.workspace.schedule.numel()


def test_a_builder_refuses_what_the_backend_refuses():
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")
    with pytest.raises(BackendRefused, match="page"):
        hopper.builder_cls(problem_of(page_size=1), SM_90)


def test_is_not_interpreted():
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")
    with pytest.raises(ArgumentError, match="cannot be interpreted"):
        hopper.prepare_assumed(SM_90)
    problem = problem_of(query_lens=frozenset({1}))
    step = make_step(problem, SM_90, [70], query_len=1, causal=True)
    with pytest.raises(ArgumentError, match="cannot be interpreted"):
        hopper.builder_cls(problem, SM_90).build(step.common)


def tensor_at(address, dtype, view):
    """The tensor that a descriptor reads, which knows its address alone."""
    pairs = zip(view.shape, view.strides, strict=True)
    size = 1 + sum((extent - 1) * stride for extent, stride in pairs)
    raw = (ctypes.c_byte * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(view.shape, view.strides)


class Simulated:
    """A Gluon kernel that is launched as Triton's are, and runs in the simulator."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, launch_pdl=False, **constants):
            assert num_warps == 4
            assert launch_pdl == (constants.pop("maxnreg", None) is not None)
            names = getattr(self.module, self.name).arg_names
            named = dict(zip(names, arguments, strict=False)) | constants
            hopper_simulator.run(
                self.module,
                self.name,
                grid,
                {name: self._convert(value) for name, value in named.items()},
            )

        return launch

    @staticmethod
    def _convert(value):
        if isinstance(value, torch.Tensor):
            return hopper_simulator.Pointer(hopper_simulator.flat(value))
        if hasattr(value, "block_shape"):
            tensor = tensor_at(value.base.data_ptr(), value.base.dtype, value)
            return hopper_simulator.Descriptor(tensor, value.block_shape)
        return value


class Interpreted:
    """The merge of many pieces, interpreted: nothing runs before it."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, launch_pdl, EARLY, **constants):  # noqa: N803 - the kernel's name
            assert launch_pdl
            assert EARLY
            self.kernel[grid](*arguments, EARLY=False, **constants)

        return launch


@pytest.mark.parametrize(
    (
        *("kernel", "num_q_heads", "query_len", "kv_dtype", "causal", "out_dtype"),
        *("parts", "attending"),
    ),
    [
        ("hopper", 16, 1, "bf16", True, "bf16", 3, "swap"),
        ("hopper", 2, 1, "bf16", True, "bf16", 27, "swap"),
        ("auto", 5, 3, "fp8", True, "bf16", 3, "swap_fp8"),
        ("hopper", 12, 4, "bf16", False, "fp32", 3, "asym"),
        ("hopper", 12, 4, "fp8", True, "fp32", 3, "asym_fp8"),
        # Enough multiprocessors for programs of 16 rows: few keys for each.
        ("hopper", 12, 4, "bf16", True, "bf16", 9, "swap"),
        ("auto", 12, 4, "fp8", False, "bf16", 9, "swap_fp8"),
    ],
)
def test_decodes_through_the_contract(
    monkeypatch,
    plan_kernel,
    merge_kernel,
    kernel,
    num_q_heads,
    query_len,
    kv_dtype,
    causal,
    out_dtype,
    parts,
    attending,
):
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")
    from mla_decode_triton import auto, auto_builder
    from mla_decode_triton.hopper import (
        asym,
        asym_fp8,
        builder,
        merge_rows,
        swap,
        swap_fp8,
        variants,
    )

    modules = {"asym": asym, "asym_fp8": asym_fp8, "swap": swap, "swap_fp8": swap_fp8}
    for name, module in modules.items():
        simulated = Simulated(module, f"{name}_kernel")
        monkeypatch.setattr(variants, f"{name}_kernel", simulated)
    monkeypatch.setattr(variants, "plan_kernel", plan_kernel)
    merges_rows = Simulated(merge_rows, "merge_kernel")
    monkeypatch.setattr(variants, "merge_rows_kernel", merges_rows)
    monkeypatch.setattr(variants, "merge_kernel", Interpreted(merge_kernel))
    monkeypatch.setattr(builder, "on_device", nullcontext)
    monkeypatch.setattr(grid, "H200_MULTIPROCESSORS", parts)
    on_a_card = auto.Choice(backend=auto.HOPPER, reasons=())
    monkeypatch.setattr(auto_builder, "choose", lambda *_: on_a_card)
    backend = chosen_backend(kernel)
    problem = problem_of(
        num_q_heads=num_q_heads,
        page_size=32,
        query_lens=frozenset({1, query_len}),
        kv_dtype=kv_dtype,
        masks=frozenset(Mask),
        needs_lse=True,
        out_dtype=out_dtype,
        max_model_len=512,
        kv_page_stride=32 * 576 + 64,
    )
    step = make_step(
        problem,
        SM_90,
        [300, 40, 0],
        query_len=query_len,
        causal=causal,
        stride=32 * 576 + 64,
    )
    made = backend.builder_cls(problem, SM_90)
    names = hopper.kernel_names(problem, SM_90)
    for q in (step.q, torch.cat([step.q] * 2, 1)[:, :num_q_heads]):
        metadata = made.build(step.common)
        out, lse = backend.forward(
            q, step.kv_cache, metadata, softmax_scale=SCALE, kv_scale=step.kv_scale
        )
        out_truth, lse_truth = step.oracle()
        assert relative_error(out, out_truth) < 6e-3
        torch.testing.assert_close(lse, lse_truth.float(), atol=2e-3, rtol=0)
        assert metadata.facts().kernels == (f"{attending}_kernel", "merge_kernel")
        assert set(metadata.facts().kernels) <= set(names)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, "swap_kernel"),
        ({"kv_dtype": "fp8"}, "swap_fp8_kernel"),
        ({"num_q_heads": 64}, "asym_kernel swap_kernel"),
        ({"num_q_heads": 64, "kv_dtype": "fp8"}, "asym_fp8_kernel swap_fp8_kernel"),
        ({"num_q_heads": 64, "graphs": True, "max_model_len": 32768}, "asym_kernel"),
        ({"num_q_heads": 64, "max_num_reqs": 1, "max_model_len": 512}, "swap_kernel"),
    ],
)
def test_names_its_kernels(fields, names):
    problem = problem_of(query_lens=frozenset({1}), **fields)
    assert hopper.kernel_names(problem, SM_90) == (*names.split(), "merge_kernel")


def test_says_where_the_contract_kit_passed():
    assert hopper.evidence(CARD).startswith("hardware; the Hopper kernel alone")
    assert hopper.evidence(CARD).endswith("contract kit on an H200, 2026-11-30")
    assert hopper.evidence(SM_90).startswith("simulated")
