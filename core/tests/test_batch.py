"""The clauses BLOCK, LENGTHS and VALIDATE, as far as the host sees them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mla_decode import BackendRefused, BatchError, Dcp, Mask
from mla_decode.batch import QueryLenSupport, check_batch

CPU = torch.device("cpu")
SPOILT_VECTORS = {
    "int64": lambda t: t.long(),
    "short": lambda t: t[:-1],
    "elsewhere": lambda t: t.to("meta"),
    "strided": lambda t: t.repeat_interleave(2)[::2],
    "list": lambda t: t.tolist(),
}
SPOILT_TABLES = {
    "int64": lambda t: t.long(),
    "too few rows": lambda t: t[:1],
    "too narrow": lambda t: t[:, :1],
    "transposed": lambda t: t.t().contiguous().t(),
    "elsewhere": lambda t: t.to("meta"),
    "one row": lambda t: t[0],
    "list": lambda t: t.tolist(),
}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def check(step, support=QueryLenSupport.UNIFORM, **changes):
    common = replace(step.common, **changes)
    return check_batch(
        common,
        step.problem,
        causal=bool(common.causal),
        support=support,
        device=CPU,
        block_starts=lambda reqs, length: torch.arange(reqs + 1).int() * length,
    )


@pytest.mark.parametrize("causal", [True, False])
def test_a_uniform_batch_has_its_block_length(make_step, causal):
    shape = check(make_step(seq_lens=(9, 4, 30), query_len=3, causal=causal))
    assert (shape.num_reqs, shape.query_len, shape.num_decode_tokens) == (3, 3, 9)


def test_pads_at_the_tail_count_as_blocks(make_step):
    step = make_step(seq_lens=(9, 4), query_len=3, pads=2)
    for tokens in (6, 12):
        shape = check(step, num_actual_tokens=tokens)
        assert (shape.query_len, shape.num_decode_tokens) == (3, 12)


def test_an_all_pad_batch_has_the_block_length_it_states(make_step):
    shape = check(make_step(seq_lens=(), query_len=4, pads=3))
    assert (shape.num_reqs, shape.query_len, shape.num_decode_tokens) == (3, 4, 12)


def test_a_causal_batch_may_be_ragged_where_the_builder_is_varlen(make_step):
    step = make_step(seq_lens=(9, 4, 30), query_lens=(3, 1, 2), pads=1)
    shape = check(step, QueryLenSupport.VARLEN)
    assert (shape.query_len, shape.num_decode_tokens) == (0, 7)
    with pytest.raises(BatchError, match="mixes block lengths"):
        check(step, QueryLenSupport.UNIFORM)


def test_a_non_causal_batch_is_uniform_under_every_builder(make_step):
    step = make_step(seq_lens=(9, 4), query_lens=(3, 1), causal=False)
    with pytest.raises(BatchError, match="mixes block lengths"):
        check(step, QueryLenSupport.VARLEN)


def test_max_query_len_may_be_an_upper_bound(make_step):
    assert check(make_step(query_len=2), max_query_len=5).query_len == 2


@pytest.mark.parametrize("value", [None, 0, -1, True, np.int64(1)])
def test_max_query_len_is_a_positive_int(make_step, value):
    with pytest.raises(BatchError, match="max_query_len"):
        check(make_step(), max_query_len=value)


def test_max_query_len_covers_every_block(make_step):
    step = make_step(seq_lens=(9, 4), query_len=3, pads=1)
    with pytest.raises(BatchError, match="max_query_len is smaller"):
        check(step, max_query_len=2)


def test_max_query_len_covers_blocks_that_add_up_to_a_uniform_batch(make_step):
    step = make_step(seq_lens=(9, 9), query_lens=(3, 1))
    with pytest.raises(BatchError, match="max_query_len is smaller"):
        check(step, QueryLenSupport.VARLEN, max_query_len=2)


@pytest.mark.parametrize("value", [0, -1, 3, None, True, np.int64(1)])
def test_num_reqs_is_an_int_within_what_the_problem_was_sized_for(make_step, value):
    with pytest.raises(BatchError) as caught:
        check(make_step(seq_lens=(5, 5)), num_reqs=value)
    assert caught.value.got == repr(value)
    assert caught.value.allowed == "1..2"


@pytest.mark.parametrize(
    "starts",
    [
        None,
        [0, 1, 2],
        int32(0, 1),
        torch.tensor([0, 1, 2]),
        torch.empty(3, dtype=torch.int32, device="meta"),
        int32(0, 1, 2).to_sparse(),
    ],
)
def test_the_host_copy_of_the_starts_has_one_form(make_step, starts):
    with pytest.raises(BatchError, match="query_start_loc_cpu has the wrong form"):
        check(make_step(seq_lens=(5, 5)), query_start_loc_cpu=starts)


@pytest.mark.parametrize("starts", [int32(1, 2, 3), int32(0, 2, 1)])
def test_the_starts_are_a_cumulative_sum_from_zero(make_step, starts):
    with pytest.raises(BatchError, match="cumulative sum"):
        check(make_step(seq_lens=(5, 5)), query_start_loc_cpu=starts)


def test_a_pad_before_a_real_request_is_refused(make_step):
    with pytest.raises(BatchError, match="pad request stands before"):
        check(make_step(seq_lens=(5, 5)), query_start_loc_cpu=int32(0, 0, 1))


@pytest.mark.parametrize("tokens", [0, 5, 7, 13])
def test_tokens_are_those_of_the_blocks_or_of_the_padded_batch(make_step, tokens):
    step = make_step(seq_lens=(9, 4), query_len=3, pads=2)
    with pytest.raises(BatchError) as caught:
        check(step, num_actual_tokens=tokens)
    assert caught.value.allowed == "6 or 12"


@pytest.mark.parametrize(
    "tokens", [None, 6.0, np.int64(6), [6], torch.ones(2)], ids=repr
)
def test_tokens_are_an_int_whatever_the_batch(make_step, tokens):
    step = make_step(seq_lens=(9, 4), query_len=3)
    with pytest.raises(BatchError, match="num_actual_tokens is not an int"):
        check(step, num_actual_tokens=tokens)


@pytest.mark.parametrize("tokens", [3, 7])
def test_tokens_of_a_ragged_batch_hold_its_blocks_and_few_pads(make_step, tokens):
    step = make_step(seq_lens=(9, 4), query_lens=(3, 1))
    with pytest.raises(BatchError) as caught:
        check(step, QueryLenSupport.VARLEN, num_actual_tokens=tokens)
    assert "4, or up to 6" in caught.value.allowed


def test_a_block_length_that_the_problem_does_not_name_is_refused(make_step):
    step = make_step(seq_lens=(9, 9), query_len=2, query_lens=(2, 2))
    problem = replace(step.problem, query_lens={1, 3}, masks={Mask.NON_CAUSAL})
    with pytest.raises(BackendRefused) as caught:
        check(replace(step, problem=problem))
    assert caught.value.codes == {"query_len", "mask"}
    assert caught.value.refusals[0].got == "[2]"
    with pytest.raises(BackendRefused) as caught:
        check(replace(step, problem=replace(step.problem, query_lens={1, 3})))
    assert caught.value.codes == {"query_len"}


def test_a_mask_that_the_problem_does_not_name_is_refused(make_step):
    step = make_step(seq_lens=(9, 9), query_len=2, causal=False, masks={Mask.CAUSAL})
    with pytest.raises(BackendRefused) as caught:
        check(step)
    assert caught.value.codes == {"mask"}
    assert caught.value.refusals[0].got == "non_causal"


def test_one_token_blocks_are_served_under_either_mask(make_step):
    for named in Mask:
        step = make_step(seq_lens=(9, 9), causal=named is Mask.CAUSAL, masks={named})
        assert check(step, causal=named is not Mask.CAUSAL).query_len == 1


def test_a_one_token_builder_takes_one_token(make_step):
    assert check(make_step(seq_lens=(5, 5)), QueryLenSupport.SINGLE).query_len == 1
    with pytest.raises(BatchError, match="one token a request"):
        check(make_step(query_len=2), QueryLenSupport.SINGLE)


@pytest.mark.parametrize("longest", [-1, 10**6, None, True, np.int64(5)])
def test_max_seq_len_is_an_int_within_max_model_len(make_step, longest):
    with pytest.raises(BatchError, match="max_seq_len is outside"):
        check(make_step(), max_seq_len=longest)


def test_a_causal_block_is_no_longer_than_its_sequence(make_step):
    step = make_step(seq_lens=(9,), query_len=4)
    with pytest.raises(BatchError, match="longer than its sequence"):
        check(step, max_seq_len=3)
    assert check(step, max_seq_len=0).query_len == 4
    assert check(step, max_seq_len=3, causal=False).query_len == 4
    ragged = make_step(seq_lens=(9, 9), query_lens=(4, 2))
    with pytest.raises(BatchError, match="longer than its sequence"):
        check(ragged, QueryLenSupport.VARLEN, max_seq_len=1)


def test_the_longest_causal_block_may_be_that_of_an_empty_request(make_step):
    step = make_step(seq_lens=(0, 2), query_lens=(4, 1))
    assert step.common.max_seq_len == 2
    assert check(step, QueryLenSupport.VARLEN).num_decode_tokens == 5


def test_local_lengths_may_be_anything_under_dcp(make_step):
    step = make_step(seq_lens=(9,), query_len=4, dcp=Dcp(world=4))
    assert check(step, max_seq_len=3, dcp_local_seq_lens=int32(0)).query_len == 4


def test_local_lengths_come_with_dcp_and_only_with_it(make_step):
    with pytest.raises(BatchError, match="dcp_local_seq_lens has the wrong form"):
        check(make_step(dcp=Dcp(world=2)))
    with pytest.raises(BatchError, match="names no group of ranks"):
        check(make_step(), dcp_local_seq_lens=int32(3))


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens"])
@pytest.mark.parametrize("spoil", SPOILT_VECTORS.values(), ids=SPOILT_VECTORS)
def test_device_vectors_have_one_form(make_step, name, spoil):
    step = make_step(seq_lens=(5, 5))
    spoilt = spoil(getattr(step.common, name))
    with pytest.raises(BatchError, match=f"{name} has the wrong form"):
        check(step, **{name: spoilt})


@pytest.mark.parametrize("spoil", SPOILT_TABLES.values(), ids=SPOILT_TABLES)
def test_the_block_table_has_one_form(make_step, spoil):
    step = make_step(seq_lens=(40, 40), page_size=16)
    with pytest.raises(BatchError, match="block_table_tensor has the wrong form"):
        check(step, block_table_tensor=spoil(step.common.block_table_tensor))


def test_the_block_table_may_be_a_slice_of_a_wider_and_longer_one(make_step):
    step = make_step(seq_lens=(40, 40), page_size=16)
    wide = torch.full((8, 64), -1, dtype=torch.int32)
    wide[:2, :5] = step.common.block_table_tensor
    assert check(step, block_table_tensor=wide[:, :3]).num_reqs == 2
