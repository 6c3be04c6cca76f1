"""Pages of a report: what they show, what they escape, and what they are not made of."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from mla_decode_contract import cli
from mla_decode_contract.pages import markdown
from mla_decode_contract.pages.badge import badge
from mla_decode_contract.pages.form import Form
from mla_decode_contract.pages.limits import numbers
from mla_decode_contract.pages.publish import publish
from mla_decode_contract.reading import ReportProblem

HOSTILE = "<script>alert(1)</script> | **b** `c` $x$ [l](http://evil)\n# h & {{ 7*7 }}"
PROOF = {
    "mutants": [
        {"name": "lse_log2", "caught": True, "by": ["lse.natural_log"]},
        {"name": "mask_ignored", "caught": False, "by": []},
    ],
    "false_alarms": 0,
    "not_applicable": [{"name": "fp8_scale", "reason": "needs fp8"}],
}
VOID = {"meta", "link"}


def _kit(*arguments):
    """Run the command line in this process and give its status."""
    before, sys.argv = sys.argv, ["mla-decode-contract", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as left:
        return left.code
    finally:
        sys.argv = before
    return None


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A report with failures, refusals and numbers, as the kit writes it."""
    directory = tmp_path_factory.mktemp("run")
    options = ("--quick", "--mutant", "lse_log2", "--workers", "1")
    assert _kit("run", "reference", *options, "--report", directory) == 1
    return json.loads((directory / "report.json").read_text(encoding="utf-8"))


@pytest.fixture
def report(plain):
    """The same, to be changed."""
    return json.loads(json.dumps(plain))


@pytest.fixture
def written(tmp_path):
    """Write a report and perhaps a proof, and give the page's text."""

    def write(report, form, proof=None):
        _write(tmp_path / "report.json", report)
        if proof is not None:
            _write(tmp_path / "prove.json", proof)
        page, shown = publish(tmp_path, Form(form))
        assert page == tmp_path / f"report.{form}"
        assert json.loads(shown.read_text(encoding="utf-8")) == badge(report)
        return page.read_text(encoding="utf-8")

    return write


def _write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


class _Page(HTMLParser):
    """Tags, attributes and text of a page whose tags must be balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], set(), [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def _failed(report):
    return [case for case in report["cases"] if case["outcome"] == "failed"]


@pytest.mark.parametrize("form", ["md", "html"])
def test_says_what_was_tested_on_what_and_with_what_evidence(form, plain, written):
    text = written(plain, form)
    shown = _Page(text).text if form == "html" else text.replace("\\_", "_")
    assert "reference with the mutant lse_log2 on cpu" in shown
    assert "not conformant (reference, quick)" in shown
    assert plain["finished_at"][:10] in shown
    for said in ("torch reference of core ran", plain["torch"], plain["python"]):
        assert said in shown
    for said in ("mla-decode-contract 0.1.0", "1..1048575", "hardware cannot"):
        assert said in shown
    assert len(_failed(plain)) > 20
    for case in _failed(plain):
        assert case["repeat"] in shown
        assert f"[{case['failure']['kind']}] {case['failure']['message']}" in shown


def test_html_asks_nobody_for_anything_and_fits_a_narrow_and_a_dark_screen(
    plain, written
):
    text = written(plain, "html", PROOF)
    page = _Page(text)
    assert page.tags.isdisjoint({"script", "img", "iframe", "object", "form", "base"})
    addresses = [v for k, v in page.attributes if k in {"src", "href", "srcset"}]
    assert addresses == ["data:,"]
    assert not re.search(r"https?:|@import|url\(|\bon\w+=", text)
    assert ("name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert text.count('<div class="wide"><table') == text.count("<table")


@pytest.mark.parametrize("form", ["md", "html"])
def test_the_heat_map_has_numbers_answers_and_faults(form, report, written):
    cells = {
        (c["num_q_heads"], c["query_len"], c["mask"]): c
        for c in report["declared"]["cells"]
    }
    cells[4, 8, "non_causal"]["refused"] = ["mask", "query_len"]
    report["declared"]["cells"].remove(cells[4, 7, "non_causal"])
    case = next(c for c in report["cases"] if c["id"] == "scale.is_required")
    measured = {"quantity": "out", "units": 3.9, "budget": 4.0, "error": 1.0}
    shape = {"num_q_heads": 4, "query_len": 2, "mask": "non_causal", "unit": 1.0}
    case["measurements"] = [
        {**measured, **shape},
        {**measured, **shape, "units": 1.0},
        {**measured, **shape, "query_len": 3, "units": 40.0},
        {**measured, **shape, "query_len": None},
    ]
    text = written(report, form).split("non causal", 1)[1]
    if form == "md":
        row = next(line for line in text.splitlines() if line.startswith("| 4 |"))
        found = [cell.strip() for cell in row.split("|")[2:-1]]
        assert found == ["3.9", "**40**", *["yes"] * 3, "", "-", "yes"]
        return
    row = re.search(r'<tr><th scope="row">4</th>(.*?)</tr>', text).group(1)
    found = re.findall(r'<td class="([\w ]+)" title="([^"]*)">([^<]*)</td>', row)
    assert [(state, shown.strip()) for state, _, shown in found] == [
        ("measured l4", "3.9"),
        ("over", "40"),
        *[("accepted", "yes")] * 3,
        ("unknown", ""),
        ("refused", "-"),
        ("accepted", "yes"),
    ]
    assert found[0][1] == "out over 1 cases: scale.is_required"
    assert found[6][1] == "refused: mask, query_len"


def _make_hostile(report):
    """Put a hostile text wherever a report holds words of others."""
    for key in ("device_name", "driver", "runtime", "torch", "evidence_of_backend"):
        report[key] = HOSTILE
    report["libraries"] = {HOSTILE: HOSTILE}
    report["kernels"] = [HOSTILE]
    report["adapter"] = dict.fromkeys(report["adapter"], HOSTILE)
    report["known_failures"] = [{"case": "c", "reason": HOSTILE, "issue": HOSTILE}]
    report["tolerances"] = [{"case": "c", "units": 5, "reason": HOSTILE}]
    report["declared"]["row"]["source"] = HOSTILE
    for case in report["cases"]:
        case["purpose"] = HOSTILE
        case["notes"] = [HOSTILE]
    for case in _failed(report):
        case["failure"]["message"] = case["repeat"] = HOSTILE


def test_html_escapes_every_text(report, written):
    _make_hostile(report)
    text = written(report, "html")
    page = _Page(text)
    assert page.tags.isdisjoint({"script", "b", "a"})
    assert page.text.count("<script>alert(1)</script>") > 150
    assert page.text.count("{{ 7*7 }}") == page.text.count("alert(1)")


def test_markdown_escapes_every_text(report, written):
    _make_hostile(report)
    text = written(report, "md")
    fenced = re.compile(r"^```text\n.*?\n```$", re.DOTALL | re.MULTILINE)
    assert len(fenced.findall(text)) == 2 * len(_failed(report))
    outside = fenced.sub("", text)
    for markup in ("<script", "**b**", "[l](", "$x$", "\n# h"):
        assert markup not in outside
    for line in outside.splitlines():
        if line.startswith("| ") and line.count(" | ") > 6:
            assert not re.search(r"(?<!\\)\| \*\*b", line)
    assert outside.count("&lt;script&gt;") > 100


def test_markdown_of_code_cannot_be_left():
    assert markdown.code("a `b` ``c``") == "``` a `b` ``c`` ```"
    assert markdown.code("a|b\nc") == "`a\\|b c`"
    assert markdown.block("x\n```\ny") == "````text\nx\n```\ny\n````"
    assert markdown.escaped("a_b|c") == "a\\_b&#124;c"
    assert markdown.escaped(markdown.escaped("a_b")) == "a\\_b"


@pytest.mark.parametrize("form", ["md", "html"])
def test_shows_the_proof_that_lies_beside_the_report(form, plain, written):
    assert "Proof" not in written(plain, form)
    text = written(plain, form, PROOF)
    assert "1 of 2 deliberate faults were caught, 0 false alarms" in text
    assert "not caught" in text
    assert "needs fp8" in text


@pytest.mark.parametrize("form", ["md", "html"])
def test_a_report_of_schema_1_0_has_a_page_without_a_heat_map(form, report, written):
    report["schema_version"] = "1.0"
    for key in ("declared", "shard", "merged_from", "provisional"):
        report.pop(key, None)
    for case in report["cases"]:
        case.pop("repeat", None)
        case.pop("provisional", None)
        for measured in case["measurements"]:
            for key in ("num_q_heads", "query_len", "mask"):
                measured.pop(key)
    text = written(report, form)
    assert "By clause" in text
    assert "Heads by query length" not in text
    assert "Declared limits" not in text


@pytest.mark.parametrize("form", ["md", "html"])
def test_names_what_did_not_run_and_what_is_not_counted_yet(form, report, written):
    case = next(c for c in report["cases"] if c["outcome"] == "passed")
    case["outcome"] = "not_run"
    report["counts"]["passed"] -= 1
    report["counts"]["not_run"] += 1
    report["not_run"] = [case["id"]]
    new = next(c for c in report["cases"] if c["outcome"] == "passed")
    new["provisional"] = True
    report["counts"]["passed"] -= 1
    text = written(report, form)
    assert "Not run" in text
    assert "New in this contract minor, so reported and not counted" in text


@pytest.mark.parametrize(
    ("code", "evidence", "colour"),
    [
        (0, "hardware", "brightgreen"),
        (0, "simulated", "blue"),
        (0, "reference", "blue"),
        (1, "hardware", "red"),
        (3, "hardware", "lightgrey"),
        (3, None, "lightgrey"),
    ],
)
def test_the_badge_keeps_the_evidence_word(code, evidence, colour, report):
    report["exit_code"], report["evidence"] = code, evidence
    report["verdict"] = f"word ({evidence})"
    assert badge(report) == {
        "schemaVersion": 1,
        "label": "mla-decode contract 1.0",
        "message": f"word ({evidence}) on cpu",
        "color": colour,
        "isError": code == 1,
    }


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        ({"first": 1, "last": 128, "step": 1}, "1..128"),
        ({"first": 16, "last": 64, "step": 16}, "16..64 step 16"),
        ([16, 64], "16, 64"),
        ([], "none"),
    ],
)
def test_numbers_are_said_shortly(allowed, text):
    assert numbers(allowed) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "{}",
        "[" * 100_000,
        '{"schema_version": "1.1", "kit": {}, "verdict": "", "cases": []}',
        '{"schema_version": "9.9", "kit": {}, "verdict": "", "cases": []}',
    ],
    ids=["empty", "words", "list", "object", "nested", "corrupt", "newer"],
)
def test_what_is_no_report_exits_with_4_and_writes_nothing(text, tmp_path, capsys):
    (tmp_path / "report.json").write_text(text, encoding="utf-8")
    assert _kit("report", tmp_path, "--format", "md") == 4
    said = capsys.readouterr().err
    assert said.startswith("ERROR: ")
    assert "got: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_a_report_with_a_number_that_is_none_is_refused(value, plain, tmp_path):
    text = json.dumps(plain)
    changed = re.sub(r'"duration_s": [\d.]+', f'"duration_s": {value}', text, count=1)
    (tmp_path / "report.json").write_text(changed, encoding="utf-8")
    with pytest.raises(ReportProblem):
        publish(tmp_path, Form.HTML)


def test_a_folder_without_a_report_exits_with_4(tmp_path, capsys):
    assert _kit("report", tmp_path) == 4
    assert _kit("report", tmp_path / "absent") == 4
    assert _kit("report", tmp_path, "--format", "pdf") == 4
    assert "absent is no directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("proof", "says"),
    [
        ("{", "is no JSON"),
        ("[]", "is no proof"),
        ('{"mutants": [{"name": "x"}]}', "is no proof"),
        (json.dumps({**PROOF, "backend": "another"}), "proves another backend"),
        (json.dumps({**PROOF, "arch": "sm_90"}), "proves another architecture"),
        (json.dumps({**PROOF, "evidence": "simulated"}), "proves by other evidence"),
    ],
)
def test_what_is_no_proof_of_this_backend_is_refused(proof, says, plain, tmp_path):
    _write(tmp_path / "report.json", plain)
    (tmp_path / "prove.json").write_text(proof, encoding="utf-8")
    with pytest.raises(ReportProblem, match=says):
        publish(tmp_path, Form.MD)
    assert not (tmp_path / "report.md").exists()


def test_a_page_that_cannot_be_written_is_a_typed_error(plain, tmp_path):
    _write(tmp_path / "report.json", plain)
    (tmp_path / "report.md").mkdir()
    with pytest.raises(ReportProblem, match="cannot be written"):
        publish(tmp_path, Form.MD)


def test_the_command_names_what_it_wrote(plain, tmp_path, capsys):
    _write(tmp_path / "report.json", plain)
    assert _kit("report", tmp_path) == 0
    page, shown = capsys.readouterr().out.split()
    assert (page, shown) == (f"{tmp_path}/report.html", f"{tmp_path}/badge.json")
