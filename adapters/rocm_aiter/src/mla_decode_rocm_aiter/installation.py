"""Which `aiter` this environment holds, found out without importing it."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from mla_decode.refusal import Refusal, RefusalCode

DISTRIBUTION = "amd-aiter"
"""AMD's distribution. PyPI's `aiter` is an unrelated library of async iterators."""
SIMULATED = "__mla_decode_simulated__"
"""Attribute by which a simulated `aiter` module says what it simulates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """AMD's AITER as it lies on the disk."""

    version: str
    """As its metadata or `_version.py` says; `unknown` where neither does."""
    package: Path
    """The folder of the `aiter` package."""
    meta: Path
    """The folder above `hsa` and `csrc`."""

    def table_path(self, arch: str) -> Path:
        """Where the kernel table of an arch lies, from 0.1.10.post1 on."""
        return self.meta / "hsa" / arch / "mla" / "mla_asm.csv"

    def build_locks(self) -> tuple[Path, ...]:
        """Locks of kernel builds that run now, or were killed and left theirs."""
        jit = Path(os.environ.get("AITER_JIT_DIR") or self.package / "jit")
        return tuple(sorted((jit / "build").glob("lock_*")))


def find_installation() -> Installation | Refusal:
    """Find AMD's AITER, or say what stands in its place.

    Nothing is imported: AITER compiles on import and may wait for another build.
    """
    spec = _spec()
    if spec is None:
        return Refusal(
            code=RefusalCode.DEPENDENCY,
            message="AITER is not installed",
            got="no module named aiter",
            allowed=f"the distribution {DISTRIBUTION}",
            fix="install AITER for this ROCm from github.com/ROCm/aiter "
            f"(distribution {DISTRIBUTION}; PyPI's `aiter` is another library)",
        )
    if not spec.submodule_search_locations:
        return _wrong_package(spec.origin or "a single-file module")
    package = Path(next(iter(spec.submodule_search_locations)))
    if spec.origin is None:
        return Refusal(
            code=RefusalCode.IMPORT,
            message="a folder named aiter without __init__.py stands before AITER",
            got=str(package),
            allowed="a package with mla.py",
            fix=f"rename {package} or run from another folder",
        )
    if not (package / "mla.py").exists():
        return _wrong_package(str(package))
    return Installation(version=_version(package), package=package, meta=_meta(package))


def _spec() -> importlib.machinery.ModuleSpec | None:
    """The import system's answer; a module without a spec counts as absent."""
    try:
        return importlib.util.find_spec("aiter")
    except ValueError:
        return None


def _wrong_package(where: str) -> Refusal:
    try:
        version = importlib.metadata.version("aiter")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    got = f"distribution aiter {version}" if version else where
    return Refusal(
        code=RefusalCode.DEPENDENCY,
        message="the module named aiter is not AMD's: it has no mla.py",
        got=got,
        allowed=f"the distribution {DISTRIBUTION}",
        fix=f"uninstall the distribution aiter and install {DISTRIBUTION}"
        if version
        else f"rename or remove {where}, and install {DISTRIBUTION}",
    )


def _version(package: Path) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pass
    written = package / "_version.py"
    return find_version(written) if written.exists() else "unknown"


def find_version(written: Path) -> str:
    """The version that a `_version.py` of any tool states, or `unknown`."""
    text = written.read_text(encoding="utf-8", errors="replace")
    match = re.search(r"__version__ = '([^']+)'", text)
    return match[1] if match else "unknown"


def _meta(package: Path) -> Path:
    """The folder that AITER itself would read its kernels from."""
    root = package.parent
    marker = package / "install_mode"
    meta = root
    if marker.exists() and b"install" in marker.read_bytes():
        meta = root / "aiter_meta"
    named = os.environ.get("AITER_META_DIR")
    if named:
        meta = Path(named)
    return meta if (meta / "csrc").exists() else root


def simulated_release() -> tuple[str, str] | None:
    """(arch, release) of a simulated `aiter` in `sys.modules`, or None."""
    found = getattr(sys.modules.get("aiter"), SIMULATED, None)
    return found if isinstance(found, tuple) else None
