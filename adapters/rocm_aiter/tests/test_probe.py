"""Shapes are tried where a death costs nothing, and remembered."""

import json
import sys

import pytest
from aiter_install import install_aiter
from aiter_steps import device_of, problem_of

from mla_decode import ArgumentError, DeviceInfo, RefusalCode
from mla_decode_rocm_aiter import backend
from mla_decode_rocm_aiter.facts import packaged_facts
from mla_decode_rocm_aiter.probe import (
    ProbeResult,
    ProbeShape,
    all_shapes,
    driver_version,
    find_drift,
    probe,
    probe_shapes,
    read_record,
    record_path,
    write_record,
)

GFX950 = {"arch": "gfx950", "release": "0.1.20.post1"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def shape_of(heads=16, q=2, *, causal=False, dtype="bf16", lse=False):
    return ProbeShape(
        heads=heads, q=q, q_dtype=dtype, kv_dtype=dtype, causal=causal, lse=lse
    )


def outcome_of(shape, **words):
    (found,) = probe_shapes([shape], simulated=GFX950 | words, timeout_s=120)
    return found


def test_a_shape_with_a_kernel_works():
    assert outcome_of(shape_of(lse=True)).outcome == "works"


def test_an_abort_is_one_entry_and_names_its_signal():
    found = outcome_of(shape_of(dtype="fp8"))
    assert found.outcome == "dies"
    assert "SIGABRT" in found.detail
    assert "heuristic kernel" in found.detail


def test_an_exception_is_kept():
    found = outcome_of(shape_of(heads=24, dtype="fp8"))
    assert found.outcome in {"raises", "dies"}


def test_a_wrong_mask_shows_over_ten_keys():
    found = outcome_of(shape_of(), faults={"ignores_causal": True})
    assert found.outcome == "wrong"
    assert "off by" in found.detail


def test_a_child_that_hangs_is_killed():
    (found,) = probe_shapes([shape_of()], simulated=GFX950, timeout_s=0.01)
    assert (found.outcome, found.detail) == ("hangs", "no answer after 0.01 s")


def result(shape, outcome):
    return ProbeResult(shape=shape, outcome=outcome, detail="")


def test_drift_of_a_known_release():
    facts = packaged_facts("gfx950", "0.1.20.post1")
    runs = result(shape_of(q=4), "works")
    dies = result(shape_of(q=4, dtype="fp8"), "dies")
    hole = result(shape_of(q=2, dtype="fp8"), "dies")
    fixed = result(shape_of(heads=48, q=2, dtype="fp8"), "works")
    limited = result(shape_of(96, 9, causal=True, dtype="fp8"), "wrong")
    drift = find_drift(facts, [runs, dies, hole, fixed, limited])
    assert drift.defects == (dies,)
    assert drift.stale == (fixed,)


def test_the_command_reports_and_records(capsys):
    shapes = [shape_of(q=4, dtype="fp8"), shape_of(q=2, dtype="fp8")]
    code = probe(device_of(), as_json=True, shapes=shapes)
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["counts"] == {"works": 1, "dies": 1}
    assert report["known"]
    assert report["defects"] == report["stale"] == []
    kept = read_record(record_path("0.1.20.post1", "gfx950", "simulated"))
    assert [kept[shape].outcome for shape in shapes] == ["works", "dies"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "3", "[3]", "[{}]", '[{"shape": {"heads": 1}}]', "[" * 9000, "\udcff"],
)
def test_a_record_that_nobody_wrote_is_a_typed_error(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ArgumentError, match="probe again"):
        read_record(path)


def test_a_defect_is_exit_1(monkeypatch):
    lines = []
    monkeypatch.setattr(
        "mla_decode_rocm_aiter.probe.command.probe_shapes",
        lambda shapes, **_: [result(shape, "dies") for shape in shapes],
    )
    assert probe(device_of(), shapes=[shape_of(q=4)], say=lines.append) == 1
    assert any(line.startswith("defect") for line in lines)


def test_without_aiter_there_is_nothing_to_probe():
    lines = []
    device = DeviceInfo(vendor="rocm", arch="gfx950")
    assert probe(device, shapes=[], say=lines.append) == 1
    assert "amd-aiter" in lines[0]


def test_the_default_shapes_are_those_that_serving_meets():
    shapes = list(all_shapes())
    assert len(shapes) == len(set(shapes)) == 3 * 8 * 11 * 2
    assert shape_of(q=2, dtype="fp8") in shapes


@pytest.fixture
def unread_release(tmp_path, monkeypatch):
    """An installed AITER of a release that nobody has read."""
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    install_aiter(tmp_path / "site", monkeypatch, "0.1.30")
    (tmp_path / "site" / "aiter" / "mla.py").write_text(
        "def mla_decode_fwd(q, kv_buffer, o, causal=True): ...\n"
    )
    yield DeviceInfo(vendor="rocm", arch="gfx950")
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]


def test_an_unread_release_serves_what_a_probe_saw_work(unread_release):
    problem = problem_of(12, 4, causal=False)
    (before,) = backend.refusals(problem, unread_release)
    assert before.code is RefusalCode.VERSION
    path = record_path("0.1.30", "gfx950", driver_version())
    write_record(
        path,
        [result(shape_of(16, 4), "works"), result(shape_of(16, 5), "dies")],
    )
    assert backend.refusals(problem, unread_release) == []
    (died,) = backend.refusals(problem_of(12, 5, causal=False), unread_release)
    assert "a probe saw: dies" in died.got
    assert backend.refusals(problem_of(12, 8, causal=False), unread_release)
    assert backend.cost(problem, unread_release).kv_walks == 4
