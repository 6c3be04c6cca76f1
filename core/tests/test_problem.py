import dataclasses

import pytest

from mla_decode import ArgumentError, Dcp, DecodeProblem, Mask

BOTH = frozenset(Mask)


def test_lists_every_block_once_and_a_single_token_as_causal():
    problem = DecodeProblem(num_q_heads=16, query_lens={4, 1}, masks=BOTH)
    assert list(problem.blocks()) == [
        (1, Mask.CAUSAL),
        (4, Mask.CAUSAL),
        (4, Mask.NON_CAUSAL),
    ]
    assert problem.needs_non_causal
    assert problem.max_query_len == 4


def test_a_single_token_is_never_non_causal_in_more_than_name():
    problem = DecodeProblem(num_q_heads=16, masks={Mask.NON_CAUSAL})
    assert list(problem.blocks()) == [(1, Mask.CAUSAL)]
    assert not problem.needs_non_causal


def test_freezes_what_it_was_given():
    lens = [1, 2]
    problem = DecodeProblem(num_q_heads=16, query_lens=lens, masks=[Mask.CAUSAL])
    lens.append(3)
    assert problem.query_lens == frozenset({1, 2})
    assert hash(problem) == hash(
        DecodeProblem(num_q_heads=16, query_lens=range(1, 3), masks={Mask.CAUSAL})
    )


def test_dcp_implies_lse():
    problem = DecodeProblem(num_q_heads=16, dcp=Dcp(world=4, rank=3))
    assert problem.needs_lse
    assert problem.as_dict()["dcp"] == {"world": 4, "rank": 3, "interleave": 1}


def test_pages_and_strides_follow_from_the_fields():
    problem = DecodeProblem(num_q_heads=16, page_size=64, max_model_len=65)
    assert problem.table_width == 2
    assert problem.page_stride == 64 * 576
    wide = DecodeProblem(num_q_heads=16, page_size=64, kv_page_stride=64 * 576 + 8)
    assert wide.page_stride == 64 * 576 + 8


def test_prints_as_plain_data():
    printed = DecodeProblem(num_q_heads=16, query_lens={2, 1}, masks=BOTH).as_dict()
    assert printed["query_lens"] == [1, 2]
    assert printed["masks"] == ["causal", "non_causal"]
    assert printed["dcp"] is None
    assert set(printed) == set(DecodeProblem.__dataclass_fields__)


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({"num_q_heads": 0}, "0"),
        ({"num_q_heads": True}, "True"),
        ({"num_q_heads": 16.0}, "16.0"),
        ({"page_size": 0}, "0"),
        ({"max_num_reqs": -1}, "-1"),
        ({"max_model_len": None}, "None"),
        ({"q_dtype": "float16"}, "float16"),
        ({"kv_dtype": "int8"}, "int8"),
        ({"out_dtype": "fp8"}, "fp8"),
        ({"kv_dtype": ["bf16"]}, "['bf16']"),
        ({"query_lens": [[1]]}, "[[1]]"),
        ({"query_lens": set()}, "[]"),
        ({"query_lens": 8}, "8"),
        ({"query_lens": {0}}, "0"),
        ({"query_lens": {True}}, "True"),
        ({"query_lens": {9}, "max_model_len": 8}, "[9]"),
        ({"masks": set()}, "set()"),
        ({"masks": Mask.CAUSAL}, "Mask.CAUSAL"),
        ({"masks": {"causal"}}, "causal"),
        ({"needs_lse": 1}, "1"),
        ({"graphs": "no"}, "no"),
        ({"dcp": (4, 0)}, "(4, 0)"),
        ({"kv_page_stride": 64 * 576 - 1}, "36863"),
        ({"kv_page_stride": 36864.0}, "36864.0"),
    ],
)
def test_refuses_what_no_decode_problem_can_have(fields, got):
    with pytest.raises(ArgumentError) as caught:
        DecodeProblem(**{"num_q_heads": 16, **fields})
    assert got in caught.value.got
    assert caught.value.allowed
    assert caught.value.fix


@pytest.mark.parametrize(
    "fields",
    [
        {"world": 0},
        {"world": 2, "rank": 2},
        {"world": 2, "rank": -1},
        {"world": 2, "rank": None},
        {"world": 2, "interleave": 0},
    ],
)
def test_refuses_a_group_that_cannot_exist(fields):
    with pytest.raises(ArgumentError, match="dcp"):
        Dcp(**fields)


def test_a_summary_names_what_people_recognise_and_what_was_asked_for():
    problem = DecodeProblem(num_q_heads=16, query_lens={1, 4}, masks={Mask.NON_CAUSAL})
    assert problem.summary == (
        "16 heads, 1 token(s) causal, 4 token(s) non_causal, "
        "bf16 query, bf16 cache, page 64"
    )
    wanted = dataclasses.replace(problem, needs_lse=True, graphs=True)
    assert wanted.summary == problem.summary + ", with needs_lse, graphs"
