"""Reading a report back: what is none, and what contradicts itself, is told apart."""

import json

import pytest

from mla_decode_contract.reading import CorruptReport, ForeignReport, read_report
from mla_decode_contract.report import as_report, write_reports


@pytest.fixture
def report(finished):
    return json.loads(json.dumps(as_report(finished(is_quick=True))))


def _write(tmp_path, content):
    path = tmp_path / "some.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_report_reads_back_from_its_file_or_its_directory(tmp_path, report):
    written = write_reports(report, tmp_path)
    assert read_report(tmp_path) == written == read_report(tmp_path / "report.json")


def test_a_report_of_the_first_schema_reads_as_the_newest(tmp_path, report):
    newer = ("declared", "shard", "merged_from", "provisional")
    old = {key: value for key, value in report.items() if key not in newer}
    old["schema_version"] = "1.0"
    for case in old["cases"]:
        del case["repeat"], case["provisional"]
    read = read_report(_write(tmp_path, old))
    assert [read[key] for key in newer] == [None, None, 0, {}]
    assert read["cases"][0]["repeat"] is None
    assert read["cases"][0]["provisional"] is False


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("verdict: conformant", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ([1, 2], "is no report of the contract kit"),
        ({"name": "vscode", "version": "1"}, "JSON object of name, version"),
        ({}, "is no report of the contract kit"),
    ],
    ids=["text", "too deep", "list", "another program's", "empty"],
)
def test_what_is_no_report_is_foreign(tmp_path, content, words):
    with pytest.raises(ForeignReport, match=words) as caught:
        read_report(_write(tmp_path, content))
    assert caught.value.got
    assert caught.value.allowed
    assert caught.value.fix


def test_what_is_not_there_and_what_is_binary_are_foreign(tmp_path):
    with pytest.raises(ForeignReport, match="cannot be read"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ForeignReport, match="is no JSON"):
        read_report(tmp_path)


def test_a_report_of_a_later_kit_is_foreign(tmp_path, report):
    report["schema_version"] = "9.0"
    with pytest.raises(ForeignReport, match=r"schema_version '9\.0'"):
        read_report(_write(tmp_path, report))


def _no_counts(report):
    del report["counts"]


def _odd_outcome(report):
    report["cases"][3]["outcome"] = "fine"


def _polished(report):
    report["cases"][3]["outcome"] = "failed"


def _twice(report):
    report["cases"].append(report["cases"][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_counts, r"breaks the schema at \$"),
        (_odd_outcome, r"breaks the schema at \$\.cases\[3\]\.outcome"),
        (_polished, "contradicts itself"),
        (_twice, "backend.import_is_light twice"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_report_that_was_changed_is_corrupt(tmp_path, report, change, words):
    change(report)
    with pytest.raises(CorruptReport, match=words):
        read_report(_write(tmp_path, report))
