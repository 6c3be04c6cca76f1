"""Shards: every case in one of them, the same on every machine."""

import pytest

from mla_decode_contract.catalogue import CASES
from mla_decode_contract.session import Run, Settings
from mla_decode_contract.shard import Shard
from mla_decode_contract.target import UsageProblem

COUNTS = (1, 2, 3, 7, len(CASES))


@pytest.mark.parametrize("count", COUNTS)
def test_the_union_of_the_parts_is_the_whole_and_no_case_is_in_two(count):
    parts = [Shard(index=i + 1, count=count).part(CASES) for i in range(count)]
    dealt = [case.id for part in parts for case in part]
    assert sorted(dealt) == sorted(case.id for case in CASES)
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1


def test_a_part_keeps_the_order_of_the_whole_and_mixes_its_families():
    part = Shard(index=1, count=3).part(CASES)
    places = [CASES.index(case) for case in part]
    assert places == sorted(places)
    assert len({case.family for case in part}) > 12


def test_parts_do_not_depend_on_the_order_of_the_catalogue():
    shard = Shard(index=2, count=5)
    there, back = shard.part(CASES), shard.part(CASES[::-1])
    assert set(there) == set(back)


@pytest.mark.parametrize(
    "text",
    [
        *[
            "3/2",
            "0/2",
            "1/0",
            "0/0",
            "-1/2",
            "2",
            "/",
            "a/b",
            "1/2/3",
            "1.0/2",
            "1/9999999",
        ],
        " 1/2",
        "1/2\n",
        "",
        "\N{ARABIC-INDIC DIGIT ONE}/2",
    ],
)
def test_what_is_no_part_of_a_whole_is_a_usage_problem(text):
    with pytest.raises(UsageProblem, match="I/N"):
        Shard.parse(text)


@pytest.mark.parametrize("text", ["1/1", "2/4", "04/004"])
def test_a_shard_reads_as_it_is_written(text):
    index, count = map(int, text.split("/"))
    assert Shard.parse(text) == Shard(index=index, count=count)
    assert str(Shard.parse(text)) == f"{index}/{count}"


def test_more_shards_than_cases_are_a_usage_problem():
    shard = Shard(index=1, count=len(CASES) + 1)
    with pytest.raises(UsageProblem, match="fewer shards"):
        Run.prepare(Settings(backend="reference", shard=shard))


def test_a_shard_of_one_case_is_a_usage_problem():
    settings = Settings(
        backend="reference", shard=Shard(index=1, count=2), case="empty.block"
    )
    with pytest.raises(UsageProblem, match="exclude each other"):
        Run.prepare(settings)


def test_a_shard_of_the_quick_cases_deals_these_alone():
    count = 4
    ids = [
        case.id
        for index in range(count)
        for case in Run.prepare(
            Settings(
                backend="reference",
                is_quick=True,
                shard=Shard(index=index + 1, count=count),
            )
        ).selected
    ]
    assert sorted(ids) == sorted(case.id for case in CASES if case.is_quick)
