"""A report as junit.xml: what CI systems read."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

_IDENTITY = (
    "schema_version",
    "evidence",
    "profile",
    "quick",
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
    failed = [case for case in cases if case["outcome"] == "failed"]
    skipped = [c for c in cases if c["outcome"] not in {"passed", "refused", "failed"}]
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
    if case["outcome"] == "failed" and failure is not None:
        child = ET.SubElement(
            element,
            "failure",
            type=failure["kind"],
            message=_clean(failure["message"]),
        )
        child.text = _clean(failure["detail"])
    elif case["outcome"] not in {"passed", "refused", "failed"}:
        ET.SubElement(element, "skipped", message=case["outcome"])
    said = [f"outcome: {case['outcome']}", *case["notes"]]
    said += [
        f"{m['quantity']}: {m['units']:.3g} of {m['budget']:g} units"
        for m in case["measurements"]
    ]
    ET.SubElement(element, "system-out").text = _clean("\n".join(said))


def _clean(text: str) -> str:
    """Drop what XML 1.0 cannot hold."""
    return "".join(c for c in text if c in "\t\n\r" or ord(c) >= 0x20)
