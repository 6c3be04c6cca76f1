"""The list of cases is closed: an id that comes or goes is a decision."""

import hashlib
from collections import Counter

import pytest
from packaging.version import Version

from mla_decode.version import CONTRACT_VERSION
from mla_decode_contract.catalogue import BY_ID, CASES
from mla_decode_contract.clauses import Clause
from mla_decode_contract.registry import implementations, implements

FROZEN_SHA256 = "4a5c953d39892efe98f31cd8bb55aaba41f40ee1f9d1b01cc69c634637d3f3e6"
"""Of the ids, in order, a line each; changes with a contract minor."""


def test_ids_are_frozen():
    text = "\n".join(case.id for case in CASES)
    assert hashlib.sha256(text.encode()).hexdigest() == FROZEN_SHA256


def test_every_clause_has_a_case():
    counted = Counter(case.clause for case in CASES)
    assert {clause for clause in Clause if not counted[clause]} == set()


def test_there_are_at_least_forty_five_and_none_twice():
    assert len(CASES) >= 45
    assert len(BY_ID) == len(CASES)


def test_every_case_has_a_function_and_every_function_a_case():
    assert set(implementations()) == set(BY_ID)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_purpose_is_one_sentence(case):
    assert case.purpose.endswith(".")
    assert len(case.purpose) < 140
    assert case.profile in {"cpu", "device"}
    assert Version(case.since) <= Version(CONTRACT_VERSION)


def test_quick_cases_need_no_device_and_touch_most_clauses():
    quick = [case for case in CASES if case.is_quick]
    assert {case.profile for case in quick} == {"cpu"}
    assert len({case.clause for case in quick}) >= 17


@pytest.mark.parametrize("case_id", ["mask.no_such_case", "repeat.bit_equal"])
def test_refuses_a_function_for_an_unknown_or_a_taken_id(case_id):
    implementations()
    with pytest.raises(LookupError, match="unknown or registered twice"):
        implements(case_id)(print)
