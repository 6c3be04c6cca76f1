"""The doctor's half: backends are asked in children, and a death is one more finding."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from mla_decode.diagnosis.children import PATIENCE_S, ask_child
from mla_decode.diagnosis.finding import Finding, Level, Section
from mla_decode.diagnosis.symptoms import symptom_of

if TYPE_CHECKING:
    from mla_decode.device import DeviceInfo
    from mla_decode.diagnosis.children import ChildAnswer

_ASK = """
import json, sys
from mla_decode.device import DeviceInfo
from mla_decode.diagnosis.asking import answer
device, elsewhere = json.loads(sys.argv[1])
answer(DeviceInfo(**device), sys.argv[2:], elsewhere=elsewhere)
"""


def backend_sections(
    device: DeviceInfo, timeout_s: float = PATIENCE_S, *, elsewhere: bool = False
) -> tuple[Section, ...]:
    """A section for each backend, known or installed, and one for who serves.

    All are asked in one child; where it dies, another one asks those that are left.

    Args:
        device: This machine's, or the one that its image is meant for.
        timeout_s: Of each child.
        elsewhere: Whether this machine need not have the device: that it is absent is
            then worth a warning.
    """
    asked_about = json.dumps([device.as_dict(), elsewhere])
    found: dict[str, list[Finding]] = {}
    serving: list[str] = []
    is_done = False
    while not is_done:
        child = ask_child(_ASK, asked_about, *found, timeout_s=timeout_s)
        asked: list[str] = []
        for said in child.said:
            if "serving" in said:
                serving.append(said["serving"])
            elif said["name"]:
                asked = [*asked, said["name"]]
                group = found.setdefault(said["name"], [])
                group += map(Finding.from_dict, said["findings"])
            else:
                is_done = True
        if not is_done:
            name = asked[-1] if asked else "backends"
            found.setdefault(name, []).append(_death(child))
            is_done = not asked
    sections = [
        Section(about=name, findings=tuple(map(with_symptom, findings)))
        for name, findings in found.items()
    ]
    return (*sections, _verdict(device, serving))


def with_symptom(finding: Finding) -> Finding:
    """The same finding, with the cause that its words give away."""
    symptom = None if finding.level is Level.OK else symptom_of(finding.got)
    if symptom is None:
        return finding
    fix = f"{symptom.fix}; {finding.fix}" if finding.fix else symptom.fix
    return replace(finding, what=f"{finding.what} ({symptom.cause})", fix=fix)


def _death(child: ChildAnswer) -> Finding:
    return Finding(
        level=Level.ERROR,
        what="the process that asked this backend did not end well",
        got=child.trouble,
        fix="import the backend's library in a Python of its own, and read its words; "
        "where it was late, a build may run: give it time with --timeout",
    )


def _verdict(device: DeviceInfo, serving: list[str]) -> Section:
    if serving:
        finding = Finding(level=Level.OK, what=f"{device.arch}: {', '.join(serving)}")
    else:
        finding = Finding(
            level=Level.ERROR,
            what=f"no backend serves {device.arch} unless it is named",
            fix="repair one of the backends above, or install an adapter",
        )
    return Section(about="served by", findings=(finding,))
