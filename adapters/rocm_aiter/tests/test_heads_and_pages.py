"""Padding of heads, expansion of pages, scales, and what a build launches."""

import subprocess
import sys

import pytest
import torch
from aiter_steps import SCALE, Step, device_of, problem_of, serve
from torch.utils._python_dispatch import TorchDispatchMode

from mla_decode import ArgumentError, BackendRefused, BatchError, StaleMetadataError
from mla_decode_rocm_aiter import AiterMLAHelper, backend
from mla_decode_rocm_aiter.expansion import RowUnits, expand_pages
from mla_decode_rocm_aiter.expansion_kernel import expand_kernel


@pytest.mark.parametrize(
    ("heads", "padded", "repeats"),
    [
        (1, 16, 16),
        (2, 16, 8),
        (8, 16, 2),
        (12, 16, 0),
        (15, 16, 0),
        (16, 16, 1),
        (17, 32, 0),
        (24, 32, 0),
        (33, 48, 0),
        (48, 48, 0),
        (113, 128, 0),
        (128, 128, 0),
    ],
)
def test_heads_pad_to_groups_of_16(heads, padded, repeats):
    assert AiterMLAHelper.get_actual_mla_num_heads(heads) == padded
    assert AiterMLAHelper.repeats(heads) == repeats
    assert AiterMLAHelper.is_valid_num_heads(heads)


def test_heads_past_128_are_refused():
    assert not AiterMLAHelper.is_valid_num_heads(129)
    assert backend.refusals(problem_of(129), device_of())


@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp8 fp8", "bf16 fp8"])
@pytest.mark.parametrize("heads", [1, 4, 12, 16, 24, 33, 48, 96, 113, 128])
def test_every_head_gets_its_own_answer(heads, dtypes):
    lse = dtypes != "bf16 fp8"
    serve(problem_of(heads, 3, dtypes=dtypes, needs_lse=lse), device_of(), [5, 40, 3])


@pytest.mark.parametrize("heads", [8, 12, 33])
def test_a_query_with_room_for_the_padding_is_widened_and_not_copied(heads):
    device = device_of()
    problem = problem_of(heads, 4, causal=False, needs_lse=True)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [9, 30], causal=False)
    padded = AiterMLAHelper.get_actual_mla_num_heads(heads)
    wide = torch.full((8, padded, 576), torch.nan, dtype=torch.bfloat16)
    wide[:, :heads] = step.q
    _, found = step.run(builder, q=wide[:, :heads])
    step.check(found)
    assert builder._padded_q is None


def test_a_query_without_room_at_the_end_of_its_memory_is_copied():
    device = device_of()
    problem = problem_of(12, 1)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [9, 30])
    storage = torch.zeros(16 * 576 + 12 * 576, dtype=torch.bfloat16)
    narrow = storage.as_strided((2, 12, 576), (16 * 576, 576, 1))
    narrow.copy_(step.q)
    _, found = step.run(builder, q=narrow)
    step.check(found)
    assert builder._padded_q is not None


@pytest.mark.parametrize("heads", [12, 16])
def test_a_query_pair_and_a_strided_query_are_served(heads):
    device = device_of()
    problem = problem_of(heads, 2)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [9, 30])
    pair = (step.q[..., :512].contiguous(), step.q[..., 512:].contiguous())
    _, found = step.run(builder, q=pair)
    step.check(found)
    apart = torch.zeros(8, heads, 576, dtype=torch.bfloat16)[::2]
    _, found = step.run(builder, q=apart.copy_(step.q))
    step.check(found)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_pages_of_any_size_become_rows(page_size):
    serve(problem_of(16, 2, page_size=page_size), device_of(), [2, page_size, 300, 257])


@pytest.mark.parametrize("gap", [576, 576 * 16, 64, 6])
def test_pages_with_gaps_become_rows_of_a_smaller_unit(gap):
    problem = problem_of(16, 2, kv_page_stride=16 * 576 + gap)
    serve(problem, device_of(), [2, 16, 300])


def test_interleaved_caches_are_served():
    """Every other page belongs to another layer: the stride is twice the page."""
    serve(problem_of(16, 1, kv_page_stride=2 * 16 * 576), device_of(), [33, 64])


def test_row_arithmetic_is_64_bit():
    table = torch.tensor([[3_000_000]], dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32)
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    units = RowUnits(unit=576, per_page=700, per_token=1)
    expand_pages(table, indptr, out, max_seq_len=3, page_size=64, units=units)
    assert out.tolist() == [2_100_000_000, 2_100_000_001, 2_100_000_002, 0, 0, 0, 0, 0]


def test_a_cache_with_more_rows_than_int32_is_refused():
    device = device_of()
    problem = problem_of(16, 1)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [9])
    metadata = builder.build(step.common)
    pages = (1 << 31) // 16 + 1
    step.cache = torch.zeros(1, dtype=torch.bfloat16).as_strided(
        (1, 16, 576), (0, 0, 0)
    )
    huge = torch.empty((pages, 16, 576), dtype=torch.bfloat16, device="meta")
    from mla_decode_rocm_aiter.forward import _cache_rows

    with pytest.raises(ArgumentError, match="32-bit"):
        _cache_rows(huge, builder)
    assert metadata.builder is builder


def test_the_expansion_never_reads_unused_slots():
    table = torch.tensor([[5, -1, 2_147_480_000], [7, 9, -1]], dtype=torch.int32)
    out = torch.full((40,), -9, dtype=torch.int32)
    indptr = torch.tensor([0, 16, 36], dtype=torch.int32)
    units = RowUnits(unit=576, per_page=16, per_token=1)
    expand_pages(table, indptr, out, max_seq_len=20, page_size=16, units=units)
    expected = [*range(80, 96), *range(112, 128), *range(144, 148), -9, -9, -9, -9]
    assert out.tolist() == expected


INTERPRETED = """
import torch
from mla_decode_rocm_aiter.expansion import RowUnits, _expand_on_cpu
from mla_decode_rocm_aiter.expansion_kernel import launch_expansion
generator = torch.Generator().manual_seed(3)
for size, per_page, per_token in ((16, 16, 1), (3, 7, 2), (64, 64, 1), (1, 1, 1)):
    lens = torch.tensor([0, 1, 2500, 16, 1024])
    wide = torch.randint(0, 99, (5, 2 * 2500), generator=generator, dtype=torch.int32)
    table = wide[:, ::2]
    indptr = torch.zeros(6, dtype=torch.int32)
    torch.cumsum(lens, 0, dtype=torch.int32, out=indptr[1:])
    one = torch.full((4000,), -1, dtype=torch.int32)
    two = one.clone()
    units = RowUnits(unit=1, per_page=per_page, per_token=per_token)
    launch_expansion(table, indptr, one, 2500, size, units)
    _expand_on_cpu(table, indptr, two, size, per_page, per_token)
    assert torch.equal(one, two)
print("equal")
"""


def test_the_kernel_and_the_cpu_expand_alike():
    """The Triton kernel, interpreted; it has not run on an AMD GPU."""
    import os

    assert expand_kernel is not None
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.stdout.strip() == "equal", done.stderr


class CountKernels(TorchDispatchMode):
    """Counts operators that launch on a device, and any that would wait for it."""

    VIEWS = frozenset(
        {"view", "slice", "select", "as_strided", "unsqueeze", "expand", "alias"}
    )
    WAITS = frozenset({"_local_scalar_dense", "item", "nonzero", "is_nonzero"})

    def __init__(self):
        super().__init__()
        self.launched, self.waits = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        on_host = name == "diff" or all(
            not isinstance(arg, torch.Tensor) for arg in args
        )
        if name in self.WAITS:
            self.waits.append(name)
        elif name not in self.VIEWS and not on_host:
            self.launched.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_a_build_launches_few_kernels_and_waits_for_none(causal, graphs):
    device = device_of()
    problem = problem_of(16, 4, causal=causal, graphs=graphs)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [40, 9], causal=causal)
    builder.build(step.common)
    with CountKernels() as counter:
        metadata = builder._build_decode(
            block_table_tensor=step.common.block_table_tensor,
            seq_lens_device=step.common.seq_lens,
            max_seq_len=40,
            query_start_loc_cpu=step.common.query_start_loc_cpu,
            query_start_loc_device=step.common.query_start_loc,
            num_decode_tokens=8,
            dcp_tot_seq_lens_device=None,
        )
    assert counter.launched == ["cumsum", "expand_pages", "le"]
    assert counter.waits == []
    assert metadata.has_persistent_metadata
    with CountKernels() as counter:
        builder.build(step.common)
    assert len(counter.launched) <= 6 + 2
    assert counter.waits == []


def test_a_build_writes_no_more_of_the_index_list_than_it_needs():
    device = device_of()
    problem = problem_of(16, 1)
    builder = backend.builder_cls(problem, device)
    builder._kv_indices.fill_(-7)
    builder.build(Step(problem, device, [9, 30]).common)
    assert int((builder._kv_indices != -7).sum()) == 39


def test_buffers_keep_their_addresses_over_builds():
    device = device_of()
    problem = problem_of(16, 4, graphs=True)
    builder = backend.builder_cls(problem, device)
    seen = set()
    for lens in ([40, 9], [4, 4], [0, 300]):
        metadata = builder.build(Step(problem, device, lens).common)
        schedule = metadata.schedule
        tensors = [metadata.kv_indptr, metadata.kv_indices, metadata.is_empty]
        tensors += [metadata.kv_last_page_lens, metadata.query_start_loc]
        tensors += [getattr(schedule, name) for name in schedule.__dataclass_fields__]
        seen.add(tuple((t.data_ptr(), tuple(t.shape)) for t in tensors))
    assert len(seen) == 1


def test_a_recorded_call_is_right_after_a_build_of_other_lengths():
    """What a graph replays: the same tensors, the contents of the newest build."""
    device = device_of()
    problem = problem_of(48, 4, dtypes="fp8 fp8", graphs=True)
    builder = backend.builder_cls(problem, device)
    first = Step(problem, device, [40, 9])
    recorded = builder.build_for_capture(first.common)
    later = Step(problem, device, [70, 4], seed=5)
    newest = builder.build(later.common)
    recorded.generation = newest.generation
    later.check(later.decode(recorded))


def test_shapes_of_the_schedule_follow_the_batch_and_not_the_lengths():
    device = device_of()
    builder = backend.builder_cls(problem_of(16, 4, causal=False), device)
    one = builder._schedule_of(2, 4)
    assert builder._schedule_of(2, 4) is one
    assert builder._schedule_of(3, 4).work_indptr.shape == one.work_indptr.shape
    assert (
        builder._schedule_of(3, 4).reduce_partial_map.shape[0]
        > one.reduce_partial_map.shape[0]
    )


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_fp8_is_the_archs_own_flavour(arch, monkeypatch):
    """From the device, not from GPU_ARCHS; the other flavour is refused by name."""
    monkeypatch.setenv("GPU_ARCHS", "gfx942;gfx950")
    device = device_of(arch)
    problem = problem_of(16, 1, dtypes="fp8 fp8")
    builder, _, _ = serve(problem, device, [9, 30])
    fnuz = arch == "gfx942"
    own = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    other = torch.float8_e4m3fn if fnuz else torch.float8_e4m3fnuz
    assert builder.dtype_q == own
    step = Step(problem, device, [9, 30])
    step.cache = step.cache.view(torch.uint8).view(other)
    with pytest.raises(StaleMetadataError, match=str(other)[6:]):
        step.run(builder)


def test_scales_are_applied_and_never_read_on_the_host():
    device = device_of()
    problem = problem_of(16, 1, dtypes="fp8 fp8")
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [9, 30])
    metadata = builder.build(step.common)
    step.check(step.decode(metadata))
    with pytest.raises(ArgumentError, match="q_scale"):
        step.decode(metadata, q_scale=0.7)
    with CountKernels() as counter:
        step.decode(metadata)
    assert counter.waits == []


def test_dtypes_come_from_the_group_and_not_from_a_global():
    """A bf16 target and an fp8 draft side by side, each with its own kernels."""
    device = device_of()
    target, _, _ = serve(problem_of(16, 2), device, [9, 30])
    draft, _, _ = serve(
        problem_of(16, 3, causal=False, dtypes="fp8 fp8"), device, [9], causal=False
    )
    kernels = [b.library.machine.launches[-1].kernel for b in (target, draft)]
    assert kernels[0].startswith("mla_a16w16")
    assert kernels[1].startswith("mla_a8w8")


def test_ragged_blocks_are_refused_and_padded_batches_served():
    device = device_of()
    problem = problem_of(48, 4, causal=False, dtypes="fp8 fp8")
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [40, 9, 0], causal=False)
    _, found = step.run(builder)
    step.check(found)
    ragged = torch.tensor([0, 4, 7, 11], dtype=torch.int32)
    from dataclasses import replace

    with pytest.raises((BatchError, BackendRefused)):
        builder.build(
            replace(
                step.common,
                query_start_loc=ragged,
                query_start_loc_cpu=ragged,
                num_actual_tokens=11,
            )
        )


def test_no_scale_has_a_default():
    device = device_of()
    problem = problem_of(16, 1)
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, [9])
    metadata = builder.build(step.common)
    with pytest.raises(TypeError, match="softmax_scale"):
        backend.forward(step.q, step.cache, metadata)
    assert SCALE != 576**-0.5
