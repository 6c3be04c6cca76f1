"""Strides and aliasing: followed where the contract allows them, else refused."""

import pytest
import torch
from fault_steps import CPU, SERVERS, Step, decoder_of, problem_of

from mla_decode import ArgumentError, BatchError, StaleMetadataError
from mla_decode.dtypes import torch_dtype

EVERYWHERE = pytest.mark.parametrize("server", SERVERS)


def head_major(q):
    """The same numbers with heads outermost in memory."""
    return q.transpose(0, 1).contiguous().transpose(0, 1)


def slice_of_wider(q):
    """The first heads of a tensor that has more of them."""
    rows, heads, width = q.shape
    wider = q.new_full((rows, 2 * heads, width), torch.nan)
    wider[:, :heads] = q
    return wider[:, :heads]


def rows_apart(q):
    """Every second row of a longer tensor."""
    wider = q.new_full((2 * q.shape[0], *q.shape[1:]), torch.nan)
    wider[::2] = q
    return wider[::2]


def behind_a_gap(q):
    """At an address that is not a multiple of 16 bytes."""
    flat = q.new_empty(q.numel() + 1)
    flat[1:] = q.reshape(-1)
    return flat[1:].view(q.shape)


def same_as_a_copy(server, view):
    problem = problem_of(12, 3, needs_lse=True)
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(problem, decoder.device, [40, 9])
    seen = view(step.q)
    before = seen.clone()
    found = step.run(decoder, q=seen)
    step.check(found)
    assert torch.equal(seen, before)
    return decoder, step


@pytest.mark.fault("LAYOUT-01")
@EVERYWHERE
def test_heads_may_lie_outermost_and_the_last_axis_may_not_be_strided(server):
    decoder, step = same_as_a_copy(server, head_major)
    strided = step.q.new_zeros((*step.q.shape[:2], 2 * 576))[..., ::2]
    with pytest.raises(ArgumentError) as caught:
        step.run(decoder, q=strided)
    assert str(strided.stride()) in caught.value.got
    assert "contiguous" in caught.value.fix


@pytest.mark.fault("LAYOUT-02")
@pytest.mark.parametrize("view", [slice_of_wider, rows_apart, behind_a_gap])
@EVERYWHERE
def test_a_slice_of_a_larger_query_gives_what_its_copy_gives(server, view):
    same_as_a_copy(server, view)


@pytest.mark.fault("LAYOUT-03")
@EVERYWHERE
def test_a_page_stride_is_followed_if_declared_and_refused_if_not(server):
    dense, apart = 64 * 576, 2 * 64 * 576
    for declared, given in ((apart, dense), (None, apart)):
        problem = problem_of(kv_page_stride=declared)
        decoder = decoder_of(problem, SERVERS[server])
        step = Step(problem, decoder.device, [100, 64])
        step.check(step.run(decoder))
        other = torch.zeros(step.kv_cache.shape[0] * given).to(torch.bfloat16)
        step.kv_cache = other.as_strided(step.kv_cache.shape, (given, 576, 1))
        with pytest.raises(StaleMetadataError) as caught:
            step.run(decoder)
        assert str(given) in caught.value.got
        assert str(problem.page_stride) in caught.value.allowed


@pytest.mark.fault("LAYOUT-06")
@pytest.mark.parametrize(
    ("server", "heads", "query_len"),
    [
        ("simulated AITER", 32, 2),
        ("simulated AITER", 48, 4),
        ("simulated AITER", 12, 1),
        ("reference", 48, 2),
        ("simulated FlashMLA", 48, 2),
        ("interpreted Triton", 5, 2),
    ],
)
def test_the_callers_output_is_filled_where_it_lies(server, heads, query_len):
    dtypes = "fp8 fp8" if server in {"simulated AITER", "reference"} else "bf16 bf16"
    problem = problem_of(heads, query_len, dtypes=dtypes)
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(problem, decoder.device, [40, 9])
    rows = step.q.shape[0]
    dtype = torch_dtype(problem.out_dtype, decoder.device)
    buffer = torch.full((rows + 4, heads, 512), 7.0, dtype=dtype)
    out = buffer[2 : rows + 2]
    address = out.data_ptr()
    found = step.run(decoder, out=out)
    assert found.out.data_ptr() == out.data_ptr() == address
    step.check(found._replace(out=buffer[2 : rows + 2]))
    assert (buffer[:2] == 7).all()
    assert (buffer[rows + 2 :] == 7).all()


@pytest.mark.fault("LAYOUT-07")
def test_wide_and_strided_tables_are_refused_the_same_way_by_all():
    told = {}
    for name, server in SERVERS.items():
        problem = problem_of()
        decoder = decoder_of(problem, server)
        step = Step(problem, CPU, [100, 64])
        table, lens = step.common.block_table_tensor, step.common.seq_lens
        spread = torch.stack((table, table), dim=-1).view(2, -1)[:, ::2]
        wrong = (
            {"block_table_tensor": table.long()},
            {"block_table_tensor": spread},
            {"seq_lens": lens.long()},
            {"seq_lens": torch.stack((lens, lens), dim=-1)[:, 0]},
            {"query_start_loc": step.common.query_start_loc.long()},
        )
        for fields in wrong:
            with pytest.raises(BatchError, match="wrong form") as caught:
                decoder.plan(step.changed(**fields).common)
            (field, tensor), error = next(iter(fields.items())), caught.value
            assert str(tensor.dtype).removeprefix("torch.") in error.got
            assert str(list(tensor.stride())) in error.got
            assert error.allowed.startswith("int32")
            told.setdefault((field, error.got), set()).add(str(error))
        step.check(step.run(decoder))
        assert len(told) == len(wrong), name
    assert all(len(words) == 1 for words in told.values())
