"""A report as junit.xml: what CI systems read."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

_IDENTITY = (
    "schema_version",
    "evidence",
    "profile",
    "quick",
    "merged_from",
    "seed",
    "torch",
    "driver",
    "runtime",
    "device_name",
    "verdict",
    "python",
    "platform",
    "started_at",
    "finished_at",
)


def junit_xml(report: dict[str, Any]) -> bytes:
    """One test suite with the run's identity as properties."""
    cases = report["cases"]
    failed = [case for case in cases if _is_failure(case)]
    skipped = [case for case in cases if _is_skipped(case)]
    suite = ET.Element(
        "testsuite",
        name=f"mla-decode contract: {report['adapter']['backend']}",
        tests=str(len(cases)),
        failures=str(len(failed)),
        errors="0",
        skipped=str(len(skipped)),
        time=str(report["duration_s"]),
        timestamp=report["started_at"],
    )
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(report).items():
        ET.SubElement(properties, "property", name=name, value=_clean(value))
    for case in cases:
        _add_case(suite, case)
    root = ET.Element("testsuites")
    root.append(suite)
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text


def _properties(report: dict[str, Any]) -> dict[str, str]:
    adapter = report["adapter"]
    found = {name: report[name] for name in _IDENTITY}
    found |= {f"adapter.{key}": value for key, value in adapter.items()}
    found |= {f"library.{key}": value for key, value in report["libraries"].items()}
    found["contract"] = report["contract"]["core"]
    found["kit"] = report["kit"]["version"]
    found["core"] = report["core"]["version"]
    found["arch"] = report["device"]["arch"]
    if report["shard"] is not None:
        found["shard"] = f"{report['shard']['index']}/{report['shard']['count']}"
    found["kernels"] = " ".join(report["kernels"])
    return {name: "" if value is None else str(value) for name, value in found.items()}


def _add_case(suite: ET.Element, case: dict[str, Any]) -> None:
    element = ET.SubElement(
        suite,
        "testcase",
        classname=f"{case['clause']}",
        name=case["id"],
        time=str(case["duration_s"]),
    )
    failure = case["failure"]
    repeat = [f"repeat: {case['repeat']}"] if case["repeat"] else []
    if _is_failure(case) and failure is not None:
        child = ET.SubElement(
            element,
            "failure",
            type=failure["kind"],
            message=_clean(failure["message"]),
        )
        child.text = _clean("\n".join([failure["detail"].rstrip(), *repeat]))
    elif _is_skipped(case):
        message = case["outcome"]
        if case["provisional"] and failure is not None:
            message = f"provisional: {failure['message']}"
        ET.SubElement(element, "skipped", message=_clean(message))
    said = [f"outcome: {case['outcome']}", *repeat, *case["notes"]]
    said += [
        f"{m['quantity']}: {m['units']:.3g} of {m['budget']:g} units"
        for m in case["measurements"]
    ]
    ET.SubElement(element, "system-out").text = _clean("\n".join(said))


def _is_failure(case: dict[str, Any]) -> bool:
    return case["outcome"] == "failed" and not case["provisional"]


def _is_skipped(case: dict[str, Any]) -> bool:
    """What junit calls skipped: not run, a known failure, a provisional one."""
    return not _is_failure(case) and case["outcome"] not in {"passed", "refused"}


def _clean(text: str) -> str:
    """Drop what XML 1.0 cannot hold."""
    return "".join(c for c in text if c in "\t\n\r" or ord(c) >= 0x20)
