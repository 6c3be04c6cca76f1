"""Which accelerator the operating system shows, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the kernel's drivers say of this machine."""

    vendor: str
    """``cuda``, ``rocm``, or ``cpu`` where no driver shows an accelerator."""
    arch: str = ""
    """gfx942 and the like; empty where only torch can say."""
    source: str = "no GPU driver is loaded"


def look_at_machine(root: Path = Path("/")) -> Machine:
    """Read the drivers' files: AMD's KFD topology, NVIDIA's proc folder.

    Args:
        root: Of the file system that is read.
    """
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for node in sorted(nodes.glob("*/properties")):
        version = _gfx_version(node)
        if version:
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            arch = f"gfx{major}{minor:x}{step:x}"
            return Machine(vendor="rocm", arch=arch, source=str(node))
    nvidia = root / "proc/driver/nvidia/version"
    if nvidia.exists():
        return Machine(vendor="cuda", source=str(nvidia))
    return Machine(vendor="cpu")


def _gfx_version(node: Path) -> int:
    """The version of one node; 0 for a CPU, and for what may not be read."""
    try:
        lines = node.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(fields.get("gfx_target_version", "0"))
