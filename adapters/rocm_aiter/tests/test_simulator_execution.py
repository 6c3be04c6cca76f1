import importlib
import subprocess
import sys

import pytest
import torch
from aiter_calls import make_batch, make_schedule, right_answer, run_decode
from aiter_dispatch_rows import read_rows

from mla_decode_rocm_aiter.keys import KernelKey
from mla_decode_rocm_aiter.resolve import resolve
from mla_decode_rocm_aiter.simulator import (
    Faults,
    SimulatedAbort,
    SimulatedMemoryFault,
    simulated,
)

LENS = [37, 300, 16, 1]


def close(found, right, *, tolerance=0.02):
    return torch.allclose(found.float(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("heads", [16, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp8 fp8"])
def test_executes_every_accepted_schedule_on_gfx950(dtypes, heads, q, causal):
    lens = [n + q for n in LENS]
    found = resolve(
        "0.1.20.post1", "gfx950", heads, q, *dtypes.split(), True, causal, True
    )
    with simulated("gfx950", cus=7) as machine:
        lib = importlib.import_module("aiter")

        dtype = machine.fp8 if "fp8" in dtypes else torch.bfloat16
        batch = make_batch(lens, q, heads, dtype=dtype)
        schedule = make_schedule(lib, batch, q, heads, causal=causal)
        call = {"schedule": schedule, "causal": causal, "return_lse": True}
        if not isinstance(found, KernelKey):
            with pytest.raises(SimulatedAbort):
                run_decode(lib, batch, q, heads, **call)
            return
        out, lse = run_decode(lib, batch, q, heads, **call)
        assert machine.launches[-1].key == found
    right, right_lse = right_answer(batch, q, causal=causal)
    assert close(out, right)
    assert torch.allclose(lse, right_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("q", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_executes_causal_schedules_on_gfx942(heads, q):
    with simulated("gfx942", cus=11) as machine:
        lib = importlib.import_module("aiter")

        batch = make_batch([n + q for n in LENS], q, heads, dtype=machine.fp8)
        schedule = make_schedule(lib, batch, q, heads)
        out, _ = run_decode(lib, batch, q, heads, schedule=schedule)
    assert close(out, right_answer(batch, q, causal=True)[0])


@pytest.mark.parametrize("page_size", [4, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_executes_schedules_over_pages(page_size, causal):
    with simulated("gfx950", cus=5):
        lib = importlib.import_module("aiter")

        batch = make_batch([70, 500, 64], 4, 16, page_size=page_size)
        words = {"causal": causal, "kv_granularity": 4}
        schedule = make_schedule(lib, batch, 4, 16, **words)
        out, _ = run_decode(lib, batch, 4, 16, schedule=schedule, causal=causal)
    assert close(out, right_answer(batch, 4, causal=causal)[0])


@pytest.mark.parametrize("release", ["0.1.13", "0.1.16", "0.1.19.post2"])
def test_older_releases_take_no_mask_and_apply_it(release):
    with simulated("gfx950", release):
        lib = importlib.import_module("aiter")

        batch = make_batch([90, 33], 4, 16)
        schedule = make_schedule(lib, batch, 4, 16)
        with pytest.raises(TypeError, match="causal"):
            run_decode(lib, batch, 4, 16, schedule=schedule, causal=True)
        out = torch.empty(8, 16, 512, dtype=torch.bfloat16)
        lib.mla.mla_decode_fwd(
            o=out, max_seqlen_q=4, sm_scale=192**-0.5, **batch, **schedule
        )
    assert close(out, right_answer(batch, 4, causal=True)[0])


@pytest.mark.parametrize("release", ["0.1.14.post1", "0.1.20.post1"])
def test_fails_where_aiters_host_code_failed_and_as_it_failed(release):
    """A sample of the recorded calls, run for real: exceptions and aborts alike."""
    rows = [row for row in read_rows(release) if row.causal][::37]
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    agree = 0
    for row in rows:
        with simulated(row.arch, release, cus=3) as machine:
            lib = importlib.import_module("aiter")

            kinds = dtypes | {"fp8": machine.fp8}
            batch = make_batch([20, 33], row.q, row.heads)
            batch["q"] = batch["q"].to(kinds[row.q_dtype])
            batch["kv_buffer"] = batch["kv_buffer"].to(kinds[row.kv_dtype])
            out = torch.empty(2 * row.q, row.heads, 512, dtype=torch.bfloat16)
            # Any schedule will do: dispatch does not look into it.
            schedule = {}
            if row.persistent:
                bf16 = make_batch([20, 33], 1, 16)
                schedule = make_schedule(lib, bf16, 1, 16)
            outcome = "ok"
            try:
                lib.mla.mla_decode_fwd(
                    o=out,
                    max_seqlen_q=row.q,
                    return_lse=row.lse,
                    q_scale=torch.ones(1),
                    kv_scale=torch.ones(1),
                    **batch,
                    **schedule,
                )
            except SimulatedAbort:
                outcome = "abort"
            except (AssertionError, KeyError):
                outcome = "python"
            except SimulatedMemoryFault:
                # A schedule of other shapes: the dispatch let the call through.
                outcome = "ok"
            except RuntimeError as error:
                if "mla_reduce" not in str(error):
                    raise
                outcome = "python"
        expected = "ok" if row.key else "abort" if row.ends_process else "python"
        agree += expected == outcome
    assert agree == len(rows)


def test_native_mode_ends_the_process():
    script = (
        "from mla_decode_rocm_aiter.simulator import Machine, install\n"
        "install(Machine(arch='gfx950', abort='native'))\n"
        "import aiter, torch\n"
        "x = torch.zeros(2, 16, 576, dtype=torch.float16)\n"
        "i = torch.tensor([0, 2], dtype=torch.int32)\n"
        "aiter.mla.mla_decode_fwd(x, x.view(2, 1, 16, 576)[:, :, :1], x[..., :512],\n"
        "    i, i, i, i, 2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=False, text=True
    )
    assert done.returncode == -6
    assert "unsupport Q dtype:fp16" in done.stderr


def test_the_folded_path_leaves_the_callers_memory_permuted():
    with simulated("gfx950") as machine:
        lib = importlib.import_module("aiter")

        batch = make_batch([90, 50], 4, 48, dtype=machine.fp8)
        schedule = make_schedule(lib, batch, 4, 48)
        storage = torch.empty(8, 48, 512, dtype=torch.bfloat16)
        out = storage[:]
        one = torch.ones(1)
        lib.mla.mla_decode_fwd(
            o=out,
            max_seqlen_q=4,
            sm_scale=192**-0.5,
            q_scale=one,
            kv_scale=one,
            **batch,
            **schedule,
        )
    right, _ = right_answer(batch, 4, causal=True)
    assert close(out, right)
    assert not close(storage, right)
    assert out.data_ptr() != storage.data_ptr()


def test_a_freed_schedule_is_a_memory_fault():
    with simulated("gfx950"):
        lib = importlib.import_module("aiter")

        batch = make_batch([90], 1, 16)
        schedule = make_schedule(lib, batch, 1, 16)
        schedule["work_info_set"] = schedule["work_info_set"].clone()
        with pytest.raises(SimulatedMemoryFault, match="work_info_set"):
            run_decode(lib, batch, 1, 16, schedule=schedule)


def test_an_unused_table_slot_that_is_read_is_a_memory_fault():
    with simulated("gfx950"):
        lib = importlib.import_module("aiter")

        batch = make_batch([90], 1, 16)
        batch["kv_indices"][-1] = -1
        schedule = make_schedule(lib, batch, 1, 16)
        with pytest.raises(SimulatedMemoryFault, match="page -1"):
            run_decode(lib, batch, 1, 16, schedule=schedule)


@pytest.mark.parametrize(
    ("faults", "is_nan"),
    [({}, True), ({"empty_row_nan": False, "nan_workspace": False}, False)],
)
def test_empty_rows_are_not_what_the_contract_says(faults, is_nan):
    with simulated("gfx950", faults=Faults(**faults)):
        lib = importlib.import_module("aiter")

        batch = make_batch([0, 90], 1, 16)
        schedule = make_schedule(lib, batch, 1, 16)
        out, lse = run_decode(lib, batch, 1, 16, schedule=schedule, return_lse=True)
    assert bool(out[0].isnan().all()) is is_nan
    assert bool(lse[0].isneginf().all()) is not is_nan
    assert close(out[1:], right_answer(batch, 1, causal=True)[0][1:])


def test_mutants_change_the_answer():
    for name in ("ignores_causal", "broken_fp8_fold_32", "rounds_weights"):
        with simulated("gfx950", faults=Faults(**{name: True})) as machine:
            lib = importlib.import_module("aiter")

            batch = make_batch([10, 70], 2, 32, dtype=machine.fp8)
            schedule = make_schedule(lib, batch, 2, 32, causal=False)
            out, _ = run_decode(lib, batch, 2, 32, schedule=schedule, causal=False)
        right, _ = right_answer(batch, 2, causal=False)
        assert not torch.allclose(out.float(), right, rtol=4e-3, atol=4e-3), name


def test_blocks_of_six_tokens_are_equal_rows_without_a_schedule():
    with simulated("gfx950"):
        lib = importlib.import_module("aiter")

        batch = make_batch([40, 100], 6, 16)
        out, _ = run_decode(lib, batch, 6, 16)
        right, _ = right_answer(batch, 6, causal=True)
        assert torch.equal(out[0], out[5])
        assert not close(out, right)
        batch = make_batch([40, 100], 8, 16)
        out, _ = run_decode(lib, batch, 8, 16)
        assert close(out, right_answer(batch, 8, causal=True)[0])


def test_takes_itself_out_of_sys_modules():
    with simulated():
        assert "aiter.mla" in sys.modules
    assert "aiter" not in sys.modules
