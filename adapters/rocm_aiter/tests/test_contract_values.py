"""EMPTY, LSE, OUT and REPEAT hold although AITER's own kernels differ."""

import pytest
import torch
from aiter_calls import make_batch, make_schedule, run_decode
from aiter_steps import Step, device_of, problem_of, serve

from mla_decode_rocm_aiter import backend
from mla_decode_rocm_aiter.simulator import Faults, simulated

WAYS = [
    ("gfx950", 16, 1, "bf16 bf16"),
    ("gfx950", 16, 4, "fp8 fp8"),
    ("gfx950", 48, 4, "fp8 fp8"),
    ("gfx950", 12, 8, "bf16 bf16"),
    ("gfx942", 128, 1, "bf16 bf16"),
    ("gfx942", 64, 1, "fp8 fp8"),
]


@pytest.mark.parametrize(("arch", "heads", "q", "dtypes"), WAYS)
def test_empty_rows_are_zero_and_minus_infinity(arch, heads, q, dtypes):
    problem = problem_of(heads, q, dtypes=dtypes, needs_lse=True)
    _, _, found = serve(problem, device_of(arch), [0, 30 + q, 0, 7 + q])
    empty = torch.arange(4 * q) // q % 2 == 0
    assert (found.out[empty] == 0).all()
    assert found.lse[empty].isneginf().all()
    assert found.lse[~empty].isfinite().all()


def test_the_library_itself_says_otherwise():
    with simulated("gfx950"):
        import importlib

        lib = importlib.import_module("aiter")
        batch = make_batch([0, 30], 1, 16)
        schedule = make_schedule(lib, batch, 1, 16)
        out, lse = run_decode(lib, batch, 1, 16, schedule=schedule, return_lse=True)
        assert out[0].isnan().all()
        assert lse[0].isposinf().all() or lse[0].isnan().all()
        merged = torch.logsumexp(torch.stack([lse[0], lse[1]]), dim=0)
        assert not merged.isfinite().any()


@pytest.mark.parametrize("cus", [4, 40])
def test_a_request_that_the_planner_forgot_is_empty_and_not_garbage(cus):
    lens = [100, 0, 16, 0]
    with simulated("gfx950", cus=cus):
        problem = problem_of(16, 1, needs_lse=True)
        builder = backend.builder_cls(problem, device_of())
        assert builder.library.cus == cus
        step = Step(problem, device_of(), lens)
        metadata, found = step.run(builder)
        works = metadata.schedule.work_info_set[:, 0]
        used = works[: int(metadata.schedule.work_indptr[-1])].unique().tolist()
    assert used != [0, 1, 2, 3]
    step.check(found)


@pytest.mark.parametrize("heads", [12, 16, 48])
@pytest.mark.parametrize("cus", [3, 300])
def test_lse_is_right_for_split_and_unsplit_tiles(heads, cus):
    with simulated("gfx950", cus=cus):
        problem = problem_of(heads, 4, dtypes="fp8 fp8", needs_lse=True)
        serve(problem, device_of(), [64, 500, 5])


@pytest.mark.parametrize(("arch", "heads", "q", "dtypes"), WAYS)
def test_lse_is_not_paid_for_unasked(arch, heads, q, dtypes):
    problem = problem_of(heads, q, dtypes=dtypes)
    _, _, found = serve(problem, device_of(arch), [30, 8])
    assert found.lse is None


@pytest.mark.parametrize(("arch", "heads", "q", "dtypes"), WAYS)
def test_the_callers_out_is_filled_in_place_with_its_neighbours_untouched(
    arch, heads, q, dtypes
):
    device = device_of(arch)
    problem = problem_of(heads, q, dtypes=dtypes)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [30 + q, 8 + q])
    rows = 2 * q
    fence = torch.full((rows + 2, heads, 512), 7.0, dtype=torch.bfloat16)
    out = fence[1:-1]
    address = out.data_ptr()
    _, found = step.run(builder, out=out)
    assert found.out is out
    assert out.data_ptr() == address
    assert (fence[0] == 7).all()
    assert (fence[-1] == 7).all()
    step.check(found)


@pytest.mark.parametrize(("arch", "heads", "q", "dtypes"), WAYS)
def test_the_same_step_twice_is_bit_equal(arch, heads, q, dtypes):
    device = device_of(arch)
    problem = problem_of(heads, q, dtypes=dtypes)
    outs = []
    for _ in range(2):
        builder = backend.builder_cls(problem, device)
        outs.append(Step(problem, device, [300, 8 + q]).run(builder)[1].out)
    assert torch.equal(*outs)


def test_poisoned_workspaces_leak_into_no_row():
    device = device_of()
    problem = problem_of(12, 4, dtypes="fp8 fp8", needs_lse=True)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [300, 0, 9])
    step.check(step.run(builder)[1])
    for buffer in (builder._padded_q, builder._padded_o):
        buffer.view(torch.uint8).fill_(0x7F)
    step.check(step.run(builder)[1])


@pytest.mark.parametrize("fault", ["ignores_causal", "broken_fp8_fold_32"])
def test_a_wrong_kernel_is_seen_by_these_very_checks(fault):
    with simulated("gfx950", faults=Faults(**{fault: True})):
        problem = problem_of(32, 2, causal=False, dtypes="fp8 fp8")
        with pytest.raises(AssertionError):
            serve(problem, device_of(), [10, 30], causal=False)


def test_weights_rounded_to_fp8_lose_a_long_tail():
    """The kind of kernel error that only values of one can show: 0.35 for 1."""
    device = device_of()
    problem = problem_of(16, 1, dtypes="fp8 fp8", max_model_len=4096)
    sums = {}
    for rounds in (False, True):
        with simulated("gfx950", faults=Faults(rounds_weights=rounds), cus=1):
            builder = backend.builder_cls(problem, device)
            step = Step(problem, device, [2048])
            step.q.view(torch.uint8).zero_()
            query = torch.zeros(1, 16, 576)
            query[..., 575] = 1.0
            step.q = query.to(step.q.dtype)
            cache = torch.zeros(step.cache.shape)
            cache[..., :512] = 1.0
            table = step.common.block_table_tensor[0]
            cache[..., 575] = -7.0
            cache[table[0], 0, 575] = 0.0
            step.cache = cache.to(step.cache.dtype)
            step.scales = {"q_scale": torch.ones(1), "kv_scale": torch.ones(1)}
            metadata = builder.build(step.common)
            out = backend.forward(
                step.q, step.cache, metadata, softmax_scale=1.0, **step.scales
            ).out
            sums[rounds] = float(out.float().mean())
    assert abs(sums[False] - 1.0) < 0.01
    assert sums[True] < 0.5
