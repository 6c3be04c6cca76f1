"""The catalogue of faults is complete, and what it says of its tests is so."""

import pytest


@pytest.fixture(scope="module")
def faults(catalogue):
    return catalogue.load()


@pytest.fixture(scope="module")
def met(catalogue):
    """The tests of each fault, by id."""
    found = {}
    for test in catalogue.read_tests():
        found.setdefault(test.fault, []).append(test)
    return found


def test_every_reported_fault_has_an_entry(catalogue, faults):
    expected = catalogue.expected_ids()
    assert len(expected) == len(set(expected)) == 125
    assert set(faults) == set(expected)


def test_every_entry_has_a_test_or_a_reason(faults, met):
    bare = {key for key, fault in faults.items() if not fault.reason} - set(met)
    assert bare == set()


def test_no_test_names_an_unknown_fault(faults, met):
    assert set(met) - set(faults) == set()


def test_a_level_on_a_gpu_is_claimed_where_a_test_of_it_exists(faults, met):
    for key, fault in faults.items():
        tests = met.get(key, ())
        assert ("cuda" in fault.where) == any(t.is_cuda for t in tests), key
        on_cpu = set(fault.where) - {"cuda", "cannot arise"}
        assert bool(on_cpu) <= any(not t.is_cuda for t in tests), key


def test_no_entry_rests_on_a_gpu_alone(faults):
    alone = {key for key, fault in faults.items() if set(fault.where) == {"cuda"}}
    assert alone == set()


def test_the_page_names_every_entry_with_its_test(catalogue, faults):
    page = catalogue.tables()
    for key in faults:
        assert f"</span>{key} |" in page
    for test in catalogue.read_tests():
        assert f"::{test.name}[{test.fault}]`" in page


GOOD = """
title = "Heads"
[HEADS-99]
kind = "k"
symptom = "s"
cause = "c"
here = "h"
source = ["a/b#1"]
where = ["reference"]
"""


def _load(catalogue, tmp_path, text):
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    return catalogue.load(tmp_path)


def test_reads_an_entry(catalogue, tmp_path):
    fault = _load(catalogue, tmp_path, GOOD)["HEADS-99"]
    assert (fault.group, fault.kind, fault.source) == ("Heads", "k", ("a/b#1",))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('title = "Heads"', ""),
        ('cause = "c"\n', ""),
        ('kind = "k"', 'kind = " "'),
        ('cause = "c"', 'cause = "c"\nwho = "w"'),
        ("reference", "somewhere"),
        ("reference", "cannot arise"),
        ('where = ["reference"]', 'where = ["reference"]\nreason = "r"'),
    ],
)
def test_refuses_a_malformed_entry(catalogue, tmp_path, old, new):
    assert old in GOOD
    with pytest.raises(catalogue.CatalogueError):
        _load(catalogue, tmp_path, GOOD.replace(old, new))


def test_reads_the_marker_from_a_test_source(catalogue, tmp_path):
    source = (
        "@pytest.mark.fault('A-1')\n"
        "@pytest.mark.fault('A-2')\n"
        "@pytest.mark.cuda\n"
        "def test_x(): ...\n"
        "@pytest.mark.parametrize('a', [1])\n"
        "def test_y(): ...\n"
        "@pytest.mark.fault('A-3')\n"
        "def helper(): ...\n"
    )
    (tmp_path / "test_a.py").write_text(source, encoding="utf-8")
    found = catalogue.read_tests(tmp_path)
    assert [(t.name, t.fault, t.is_cuda) for t in found] == [
        ("test_x", "A-1", True),
        ("test_x", "A-2", True),
    ]


def test_refuses_a_marker_whose_id_is_computed(catalogue, tmp_path):
    source = "@pytest.mark.fault(NAME)\ndef test_x(): ...\n"
    (tmp_path / "test_a.py").write_text(source, encoding="utf-8")
    with pytest.raises(catalogue.CatalogueError, match="literal"):
        catalogue.read_tests(tmp_path)
