"""AITER's traps: each shown on the simulated library, then met by the adapter."""

import importlib

import pytest
import torch
from aiter_calls import make_batch, make_schedule, right_answer, run_decode
from aiter_steps import Step, device_of, problem_of, serve

from mla_decode import Mask, Refusal, RefusalCode
from mla_decode_rocm_aiter import KernelKey, backend, resolve
from mla_decode_rocm_aiter.facts import packaged_facts
from mla_decode_rocm_aiter.limits import LeavingVariables, kernel_limits
from mla_decode_rocm_aiter.profiles import find_profile, known_releases
from mla_decode_rocm_aiter.simulator import SimulatedAbort, simulated
from mla_decode_rocm_aiter.tables import packaged_tables
from mla_decode_rocm_aiter.tiling import loses_keys


def library():
    return importlib.import_module("aiter")


def is_right(out, batch, q, *, causal=True):
    right, _ = right_answer(batch, q, causal=causal)
    return torch.allclose(out.float(), right, rtol=0.02, atol=0.02)


def codes(problem, device):
    return {reason.code for reason in backend.refusals(problem, device)}


@pytest.mark.parametrize("release", known_releases())
def test_the_causal_column_means_nothing_without_the_argument(release):
    profile = find_profile(release)
    table = packaged_tables()["gfx950", profile.tables["gfx950"]]
    assert table.has_non_causal_rows()  # in every release, whatever it means
    facts = packaged_facts("gfx950", release)
    assert facts.has_non_causal_kernels is profile.has_causal_argument


def test_tied_rows_leave_8_heads_and_2_tokens_unmasked():
    with simulated("gfx950") as machine:
        batch = make_batch([10, 30], 2, 8)
        out, _ = run_decode(library(), batch, 2, 8)
        assert machine.launches[-1].causal
        assert not machine.launches[-1].masks
    assert not is_right(out, batch, 2)
    builder, _, _ = serve(problem_of(8, 2), device_of(), [10, 30])
    assert builder.library.machine.launches[-1].key.heads == 16


def test_the_folded_path_gives_the_output_other_memory():
    with simulated("gfx950") as machine:
        batch = make_batch([40, 9], 4, 48, dtype=machine.fp8)
        schedule = make_schedule(library(), batch, 4, 48)
        memory = torch.empty(8, 48, 512, dtype=torch.bfloat16)
        view = memory.view(8, 48, 512)
        words = {"q_scale": torch.ones(1), "kv_scale": torch.ones(1)}
        library().mla.mla_decode_fwd(
            o=view, max_seqlen_q=4, sm_scale=192**-0.5, **words, **batch, **schedule
        )
        assert not is_right(memory, batch, 4)
    device = device_of()
    problem = problem_of(48, 4, dtypes="fp8 fp8")
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [40, 9])
    out = torch.full((8, 48, 512), torch.nan, dtype=torch.bfloat16)
    metadata = builder.build(step.common)
    found = step.decode(metadata, out=out)
    assert found.out.data_ptr() == out.data_ptr()
    step.check(found)


@pytest.mark.parametrize("page_size", [16, 64])
def test_folded_heads_read_another_requests_last_page(page_size):
    with simulated("gfx950", cus=40) as machine:
        batch = make_batch(
            [100, 2000], 3, 48, dtype=machine.fp8, page_size=page_size, poison=False
        )
        schedule = make_schedule(library(), batch, 3, 48, kv_granularity=1)
        out, _ = run_decode(library(), batch, 3, 48, schedule=schedule)
    assert not is_right(out, batch, 3)
    problem = problem_of(
        48, 3, dtypes="fp8 fp8", page_size=page_size, max_model_len=2048
    )
    _, metadata, _ = serve(problem, device_of(), [100, 2000])
    assert metadata.kv_last_page_lens.tolist() == [1, 1]
    assert int(metadata.kv_indptr[-1]) == 2100


def test_unmasked_kernels_of_gfx942_need_pages_of_one_token():
    with simulated("gfx942", cus=4) as machine:
        batch = make_batch([40, 90], 4, 128, dtype=machine.fp8, page_size=16)
        schedule = make_schedule(library(), batch, 4, 128)
        out, _ = run_decode(library(), batch, 4, 128, schedule=schedule)
        assert not machine.launches[-1].masks
    assert not is_right(out, batch, 4)
    problem = problem_of(128, 4, dtypes="fp8 fp8", page_size=16)
    serve(problem, device_of("gfx942"), [40, 90])


def test_a_missing_uniform_length_empties_the_schedule():
    with simulated("gfx950"):
        batch = make_batch([90, 40], 8, 64)
        words = {"uni_seqlen_qo": None}
        schedule = make_schedule(library(), batch, 8, 64, **words)
        assert int(schedule["work_indptr"][-1]) == 0
    _, metadata, _ = serve(problem_of(64, 8), device_of(), [90, 40])
    assert int(metadata.schedule.work_indptr[-1]) > 0


def test_missing_dtypes_plan_for_the_wrong_fold():
    with simulated("gfx950", cus=4) as machine:
        batch = make_batch([90, 40], 3, 48, dtype=machine.fp8)
        words = {"dtype_q": None, "dtype_kv": None}
        schedule = make_schedule(library(), batch, 3, 48, **words)
        out, _ = run_decode(library(), batch, 3, 48, schedule=schedule)
    assert not is_right(out, batch, 3)
    serve(problem_of(48, 3, dtypes="fp8 fp8"), device_of(), [90, 40])


@pytest.mark.parametrize(("heads", "q"), [(96, 9), (112, 12)])
def test_folded_causal_blocks_of_9_and_more_lose_a_key(heads, q):
    with simulated("gfx950", cus=4) as machine:
        batch = make_batch([q, q + 1], q, heads, dtype=machine.fp8)
        schedule = make_schedule(library(), batch, q, heads)
        out, _ = run_decode(library(), batch, q, heads, schedule=schedule)
    assert not is_right(out, batch, q)
    problem = problem_of(heads, q, dtypes="fp8 fp8")
    assert codes(problem, device_of()) == {RefusalCode.QUERY_LEN}
    serve(
        problem_of(heads, q, causal=False, dtypes="fp8 fp8"),
        device_of(),
        [q, q + 1],
        causal=False,
    )


def test_the_lengths_that_lose_a_key_are_known_exactly():
    found = {
        heads: [q for q in range(1, 17) if loses_keys(16, q, heads // 16)]
        for heads in (32, 48, 64, 80, 96, 112, 128)
    }
    assert found == {
        32: [],
        48: [],
        64: [],
        80: [],
        96: [9, 10],
        112: [9, 10, 11, 12],
        128: [9, 10, 11, 12, 13, 14],
    }


@pytest.mark.parametrize(("heads", "q"), [(96, 8), (96, 11), (112, 13)])
def test_lengths_that_lose_none_are_served(heads, q):
    serve(problem_of(heads, q, dtypes="fp8 fp8"), device_of(), [q, q + 7])


@pytest.mark.parametrize("q", [5, 16])
def test_24_heads_overflow_the_kernels_tile(q):
    with simulated("gfx950") as machine:
        batch = make_batch([q + 2, 40], q, 24)
        schedule = make_schedule(library(), batch, q, 24)
        out, _ = run_decode(library(), batch, q, 24, schedule=schedule)
        assert machine.launches[-1].key.heads == 24
    assert not is_right(out, batch, q)
    builder, _, _ = serve(problem_of(24, q), device_of(), [q + 2, 40])
    assert builder.library.machine.launches[-1].key.heads == 32


@pytest.mark.parametrize("heads", [16, 48, 80, 96, 112])
def test_causal_two_token_fp8_blocks_with_lse_abort(heads):
    with simulated("gfx950") as machine:
        batch = make_batch([10, 30], 2, heads, dtype=machine.fp8)
        schedule = make_schedule(library(), batch, 2, heads)
        with pytest.raises(SimulatedAbort, match="heuristic"):
            run_decode(library(), batch, 2, heads, schedule=schedule, return_lse=True)
    problem = problem_of(heads, 2, dtypes="fp8 fp8", needs_lse=True)
    if heads == 16:
        _, metadata, _ = serve(problem, device_of(), [10, 30])
        assert metadata.schedule is None
    else:
        assert codes(problem, device_of()) == {RefusalCode.LSE}
    serve(problem_of(heads, 2, dtypes="fp8 fp8"), device_of(), [10, 30])


@pytest.mark.parametrize("release", ["0.1.18", "0.1.20.post1"])
def test_32_requests_drop_their_schedule_unseen(release):
    lens = [3 + at for at in range(32)]
    with simulated("gfx950", release) as machine:
        batch = make_batch(lens, 1, 16)
        schedule = make_schedule(library(), batch, 1, 16)
        given = {} if machine.profile.has_causal_argument else {"causal": None}
        call = {"schedule": schedule, **given}
        if "causal" in call:
            out = torch.empty(32, 16, 512, dtype=torch.bfloat16)
            library().mla.mla_decode_fwd(
                o=out, max_seqlen_q=1, sm_scale=1.0, **batch, **schedule
            )
        else:
            run_decode(library(), batch, 1, 16, **call)
        assert machine.launches[-1].key.persistent is False
    problem = problem_of(16, 1, max_num_reqs=32)
    builder, _, _ = serve(problem, device_of("gfx950", release), lens)
    assert builder.library.machine.launches[-1].key.persistent is True


@pytest.mark.parametrize(
    ("arch", "heads", "q"), [("gfx950", 128, 1), ("gfx950", 16, 4), ("gfx942", 128, 1)]
)
def test_the_experimental_variable_breaks_working_calls(monkeypatch, arch, heads, q):
    monkeypatch.setenv("AITER_ENABLE_EXPERIMENTAL", "1")
    with simulated(arch) as machine:
        batch = make_batch([10, 30], q, heads, dtype=machine.fp8)
        schedule = make_schedule(library(), batch, q, heads)
        with pytest.raises(AttributeError, match="hk_mla_decode_fwd"):
            run_decode(library(), batch, q, heads, schedule=schedule)
    problem = problem_of(heads, q, dtypes="fp8 fp8")
    _, metadata, _ = serve(problem, device_of(arch), [10, 30])
    assert metadata.schedule is None  # the kernels without one stay in their table
    monkeypatch.setenv("AITER_ENABLE_EXPERIMENTAL", "0")
    _, metadata, _ = serve(problem, device_of(arch), [10, 30])
    assert metadata.schedule is not None


def test_the_experimental_variable_refuses_blocks_that_need_a_schedule(monkeypatch):
    monkeypatch.setenv("AITER_ENABLE_EXPERIMENTAL", "1")
    problem = problem_of(16, 4, causal=False, dtypes="fp8 fp8")
    (reason,) = backend.refusals(problem, device_of())
    assert reason.code is RefusalCode.FEATURE
    assert reason.fix == "unset AITER_ENABLE_EXPERIMENTAL"
    assert codes(problem_of(16, 4, causal=False), device_of()) == set()
    assert (
        codes(problem_of(16, 5, causal=False, dtypes="fp8 fp8"), device_of()) == set()
    )


def test_the_opus_variable_leaves_the_kernel_table(monkeypatch):
    monkeypatch.setenv("AITER_MLA_USE_OPUS", "1")
    problem = problem_of(16, 4, causal=False, dtypes="fp8 fp8")
    assert codes(problem, device_of()) == {RefusalCode.FEATURE}
    assert codes(problem_of(16, 4, dtypes="fp8 fp8"), device_of("gfx942")) == set()


@pytest.mark.parametrize("release", ["0.1.13", "0.1.17", "0.1.18", "0.1.20.post1"])
def test_signatures_move_and_calls_by_keyword_do_not(release):
    with simulated("gfx950", release) as machine:
        parameters = list(
            __import__("inspect").signature(library().get_mla_metadata_v1).parameters
        )
        place = parameters.index("dtype_q")
        assert place == {"0.1.13": 20, "0.1.17": 20}.get(release, 26)
        assert parameters[5] == "is_causal"
        assert machine.release == release
    serve(problem_of(48, 3, dtypes="fp8 fp8"), device_of("gfx950", release), [90, 40])


def test_partial_buffers_of_a_gigabyte_are_declared_first():
    """gfx950 fp8, 128 heads, 4 tokens, 64 requests: 1276 * 4 rows of 128 heads."""
    problem = problem_of(
        128, 4, causal=False, dtypes="fp8 fp8", max_num_reqs=64, max_model_len=1024
    )
    declared = backend.cost(problem, device_of()).call_bytes
    assert declared > 1276 * 4 * 128 * 512 * 4
    assert declared < 1.02 * 1276 * 4 * 128 * 513 * 4


def test_what_is_declared_is_what_the_library_allocates():
    problem = problem_of(48, 4, causal=False, dtypes="fp8 fp8", max_num_reqs=3)
    builder = backend.builder_cls(problem, device_of())
    step = Step(problem, device_of(), [40, 9, 100], causal=False)
    metadata, _ = step.run(builder)
    partial_rows = metadata.schedule.reduce_partial_map.shape[0] * 4
    partials = partial_rows * 16 * 513 * 4
    folded = 12 * 48 * (576 + 1024)
    assert backend.cost(problem, device_of()).call_bytes == partials + folded


@pytest.mark.parametrize("q", [3, 5, 6, 7])
def test_odd_blocks_without_a_schedule_are_equal_rows(q):
    with simulated("gfx942"):
        batch = make_batch([40, 100], q, 16)
        out, _ = run_decode(library(), batch, q, 16)
        assert torch.equal(out[0], out[q - 1])
    reason = resolve(
        "0.1.20.post1", "gfx942", 16, q, "bf16", "bf16", False, True, False
    )
    assert isinstance(reason, KernelKey)
    facts = packaged_facts("gfx942", "0.1.20.post1")
    limits = kernel_limits(
        facts,
        reason,
        ("bf16", "bf16"),
        Mask.CAUSAL,
        persistent=False,
        variables=LeavingVariables(),
    )
    assert [limit.code for limit in limits] == [RefusalCode.QUERY_LEN]
    if q == 3:
        serve(problem_of(16, q), device_of("gfx942"), [40, 100])
    else:
        assert codes(problem_of(16, q), device_of("gfx942")) == {RefusalCode.QUERY_LEN}


def test_a_single_split_leaves_the_lse_unwritten():
    with simulated("gfx942"):
        batch = make_batch([40, 100], 1, 32)
        words = {
            "num_kv_splits": 1,
            "num_kv_splits_indptr": torch.arange(3, dtype=torch.int32),
        }
        _, lse = run_decode(library(), batch, 1, 32, return_lse=True, **words)
        assert lse.isnan().all()
    problem = problem_of(128, 1, needs_lse=True, max_num_reqs=400)
    builder, metadata, _ = serve(problem, device_of("gfx942"), [40, 100])
    assert metadata.schedule is None
    assert builder._splits_of(400)[0] == 2


def test_tokens_made_of_heads_are_refused_where_a_mask_would_meet_them():
    device = device_of("gfx950", "0.1.14.post1")
    problem = problem_of(64, 2, dtypes="fp8 fp8")
    assert codes(problem, device) == {RefusalCode.QUERY_LEN}
    assert codes(problem, device_of("gfx950", "0.1.16")) == set()


def test_blocks_of_five_over_a_mixed_pair_are_refused_and_three_served():
    """A lookup miss during graph capture ended a worker; no row is longer than 4."""
    assert isinstance(
        resolve("0.1.20.post1", "gfx950", 16, 5, "bf16", "fp8", True, True, False),
        Refusal,
    )
    assert codes(problem_of(16, 5, dtypes="bf16 fp8"), device_of())
    serve(problem_of(16, 3, dtypes="bf16 fp8"), device_of(), [10, 30])
    assert codes(problem_of(16, 3, causal=False, dtypes="bf16 fp8"), device_of())


@pytest.mark.parametrize("heads", [4, 12])
def test_the_sizing_helpers_bare_assertion_is_never_met(heads):
    with simulated("gfx950"), pytest.raises(AssertionError):
        library().get_mla_metadata_info_v1(
            2, 1, heads, torch.bfloat16, torch.bfloat16, False
        )
    serve(problem_of(heads, 1), device_of(), [10, 30])


def test_a_schedule_outlives_what_its_caller_drops():
    """Graphs hold addresses: the builder keeps every buffer of every launch shape."""
    import gc

    device = device_of()
    problem = problem_of(16, 1, graphs=True)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [40, 9])
    metadata = builder.build_for_capture(step.common)
    for count in (1, 3, 4):
        builder.build(Step(problem, device, [5] * count).common)
    gc.collect()
    newest = builder.build(step.common)
    assert newest.schedule is metadata.schedule
    step.check(step.decode(newest))


def test_one_schedule_serves_all_layers_of_a_step():
    device = device_of()
    problem = problem_of(16, 4)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [40, 9])
    metadata = builder.build(step.common)
    before = builder.library.machine.schedules
    for _ in range(5):
        step.decode(metadata)
    assert builder.library.machine.schedules == before == 1
