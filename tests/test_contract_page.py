"""The page of the contract has a section for each clause, with that clause's cases."""

import importlib.util
import re
from pathlib import Path

import pytest

from mla_decode_contract import CASES, Clause

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def maker():
    path = ROOT / "tools" / "contract_page.py"
    spec = importlib.util.spec_from_file_location("contract_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_clause_has_a_text_and_asks_for_its_cases():
    found = re.findall(
        r"^## ([A-Z]+)\n\n(.+?)\n\n<!-- .*?(\w+) -->", PAGE, re.MULTILINE | re.DOTALL
    )
    assert [name for name, _, _ in found] == [clause.value for clause in Clause]
    assert all(name == asked for name, _, asked in found)
    assert all("<!--" not in text and text.endswith(".") for _, text, _ in found)


def test_what_the_page_asks_for_exists(maker):
    asked = re.findall(r"<!-- generated: ([\w-]+) -->", PAGE)
    assert set(asked) == set(maker.PARTS)


def test_every_case_stands_once_with_its_minor_and_purpose(maker):
    tables = "\n".join(maker.PARTS[f"cases-{clause}"]() for clause in Clause)
    rows = re.findall(r"^\| `([\w.]+)` \| ([\d.]+)", tables, re.MULTILINE)
    assert sorted(rows) == sorted((case.id, case.since) for case in CASES)
    plain = tables.replace("`", "").replace("\\|", "|")
    assert all(case.purpose in plain for case in CASES)


def test_says_how_many_cases_there_are(maker):
    assert f"The kit has {len(CASES)} cases: " in maker.counts()
