"""What a compiled kernel needs of its architecture, read from the compiler's output."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mla_decode_triton.tiles import ArchTiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one program of a compiled kernel occupies."""

    shared_bytes: int
    registers: int
    """Vector registers of a thread, accumulation registers included."""
    spilled_bytes: int
    """Stack frame of a thread: nothing of these kernels lives there but spills."""
    matrix_instructions: int
    """Matrix instructions in the listing."""

    def faults(self, arch: ArchTiles, *, needs_matrix: bool) -> list[str]:
        """What breaks the architecture's limits; empty: it fits."""
        faults = []
        if self.shared_bytes > arch.shared_bytes:
            faults.append(f"shared {self.shared_bytes} > {arch.shared_bytes} bytes")
        if self.spilled_bytes:
            faults.append(f"spills {self.spilled_bytes} bytes a thread")
        if needs_matrix and not self.matrix_instructions:
            faults.append(f"none of {', '.join(arch.matrix_instructions)}")
        return faults


def read_footprint(compiled: Any, arch: ArchTiles) -> Footprint:
    """Read a kernel that `triton.compile` made for this architecture.

    Raises:
        ValueError: The listing has not the form that this module knows.
    """
    asm = compiled.asm
    is_amd = "amdgcn" in asm
    text = asm["amdgcn"] if is_amd else asm["ptx"]
    registers, spilled = _amd_usage(text) if is_amd else _cuda_usage(asm)
    return Footprint(
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        spilled_bytes=spilled,
        matrix_instructions=sum(map(text.count, arch.matrix_instructions)),
    )


def _amd_usage(listing: str) -> tuple[int, int]:
    return (
        _number(r"\.vgpr_count:\s+(\d+)", listing),
        _number(r"\.private_segment_fixed_size:\s+(\d+)", listing),
    )


def _cuda_usage(asm: Mapping[str, Any]) -> tuple[int, int]:
    from triton.backends import nvidia  # noqa: PLC0415 - only CUDA targets need it

    tool = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        usage = subprocess.run(  # noqa: S603 - a tool of Triton's own distribution
            [str(tool), "-res-usage", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in the compiler's output: {text[-300:]!r}")
    return int(found.group(1))
