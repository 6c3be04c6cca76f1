"""The badge: a verdict in the JSON that shields.io's endpoint badges read."""

from __future__ import annotations

from typing import Any

CONFORMANT, FAILED = 0, 1
_COLOURS = {"hardware": "brightgreen"}
_ELSEWHERE = "blue"
"""Conformant, but not on the device: never the colour of hardware."""


def badge(report: dict[str, Any]) -> dict[str, Any]:
    """A badge of a report; it keeps the evidence word beside the verdict.

    Args:
        report: Keeps the schema.

    Returns:
        An object of shields.io's endpoint schema, version 1.
    """
    code = report["exit_code"]
    if code == CONFORMANT:
        colour = _COLOURS.get(report["evidence"], _ELSEWHERE)
    else:
        colour = "red" if code == FAILED else "lightgrey"
    return {
        "schemaVersion": 1,
        "label": f"mla-decode contract {report['contract']['core']}",
        "message": f"{report['verdict']} on {report['device']['arch']}",
        "color": colour,
        "isError": code == FAILED,
    }
