"""Everything that the doctor looks at, from the driver up to who decodes."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from mla_decode.device import DeviceInfo, vendor_of
from mla_decode.diagnosis.backends import backend_sections
from mla_decode.diagnosis.children import PATIENCE_S
from mla_decode.diagnosis.finding import Finding, Level, Section
from mla_decode.diagnosis.machine import Machine, look_at_machine
from mla_decode.diagnosis.torch_build import (
    TorchBuild,
    ask_torch,
    torch_findings,
    triton_finding,
)
from mla_decode.version import CONTRACT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor found."""

    device: DeviceInfo
    sections: tuple[Section, ...]

    @property
    def healthy(self) -> bool:
        """Whether no finding is an error."""
        return all(
            finding.level is not Level.ERROR
            for section in self.sections
            for finding in section.findings
        )

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        return {
            "healthy": self.healthy,
            "device": self.device.as_dict(),
            "sections": [section.as_dict() for section in self.sections],
        }


def diagnose(arch: str | None = None, timeout_s: float = PATIENCE_S) -> Diagnosis:
    """Look at this machine; no kernel library is imported into this process.

    Args:
        arch: Judge as if the machine had this one, such as an image that is built for
            it elsewhere; by default what driver and torch show.
        timeout_s: Of each child process.

    Raises:
        ArgumentError: The arch is no architecture name of a known vendor.
    """
    machine = (
        look_at_machine()
        if arch is None
        else Machine(vendor=vendor_of(arch), arch=arch, source="named by --arch")
    )
    torch, named = ask_torch(timeout_s), arch is not None
    device = _device(machine, torch, named=named)
    sections = [_base(), Section(about="device", findings=(_shown(device, machine),))]
    if isinstance(torch, Finding):
        sections.append(Section(about="torch", findings=(torch,)))
    else:
        built = torch_findings(torch, machine, elsewhere=named)
        found = (*built, triton_finding())
        sections.append(Section(about="torch", findings=found))
        sections += backend_sections(device, timeout_s, elsewhere=named)
    return Diagnosis(device=device, sections=tuple(sections))


def _device(
    machine: Machine, torch: TorchBuild | Finding, *, named: bool
) -> DeviceInfo:
    """The machine's device: as torch sees it, else as the driver shows it."""
    if not named and isinstance(torch, TorchBuild) and torch.arch:
        return DeviceInfo(vendor=torch.vendor, arch=torch.arch, name=torch.name)
    if machine.arch:
        return DeviceInfo(vendor=machine.vendor, arch=machine.arch)
    return DeviceInfo(vendor="cpu", arch="cpu")


def _base() -> Section:
    python = f"Python {platform.python_version()} on {platform.platform(terse=True)}"
    ours = f"mla-decode {metadata.version('mla-decode')}"
    return Section(
        about="mla-decode",
        findings=(
            Finding(level=Level.OK, what=ours, got=f"contract {CONTRACT_VERSION}"),
            Finding(level=Level.OK, what=python, got=sys.executable),
        ),
    )


def _shown(device: DeviceInfo, machine: Machine) -> Finding:
    name = f" ({device.name})" if device.name else ""
    return Finding(level=Level.OK, what=f"{device.arch}{name}", got=machine.source)
