"""What a probe found, kept per release, arch and driver."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs

from mla_decode.errors import ArgumentError
from mla_decode_rocm_aiter.probe.shapes import ProbeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """One shape and what became of it."""

    shape: ProbeShape
    outcome: str
    """`works`, `wrong`, `raises`, `dies` or `hangs`."""
    detail: str
    """The child's words, its signal, or the time limit."""

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON."""
        return asdict(self)


def record_path(release: str, arch: str, driver: str) -> Path:
    """Where results of one AITER on one arch under one driver are kept."""
    name = "-".join(
        re.sub(r"[^\w.+]", "_", part) for part in (release, arch, driver or "unknown")
    )
    return platformdirs.user_cache_path("mla-decode") / "rocm_aiter" / f"{name}.json"


def write_record(path: Path, results: list[ProbeResult]) -> None:
    """Keep results, replacing earlier ones of the same AITER."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([result.as_dict() for result in results], indent=1)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_record(path: Path) -> dict[ProbeShape, ProbeResult]:
    """Results by shape; empty where nothing was probed.

    Raises:
        ArgumentError: The file is no record, or one of another version.
    """
    if not path.exists():
        return {}
    try:
        found = [
            ProbeResult(
                shape=ProbeShape(**entry["shape"]),
                outcome=str(entry["outcome"]),
                detail=str(entry["detail"]),
            )
            for entry in json.loads(path.read_text(encoding="utf-8"))
        ]
        return {result.shape: result for result in found}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ArgumentError(
            "The record of earlier probes cannot be read.",
            got=f"{path}: {type(error).__name__}: {error}",
            allowed="what `mla-decode probe rocm_aiter` wrote",
            fix="delete the file, and probe again",
        ) from error


def driver_version() -> str:
    """The amdgpu driver's version, or the kernel's that carries it; empty if none."""
    for source in (
        Path("/sys/module/amdgpu/version"),
        Path("/proc/sys/kernel/osrelease"),
    ):
        if source.exists():
            return source.read_text(encoding="utf-8").strip()
    return ""
