"""What the words of a failed import mean: the same few causes behind all libraries."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A cause that is known by the words of the dynamic linker or of Python."""

    pattern: str
    cause: str
    fix: str


SYMPTOMS = (
    Symptom(
        pattern=r"lib(torch|c10)_(cuda|hip)[^ ]*: cannot open shared object",
        cause="wrong torch build: it needs torch's CUDA or ROCm build, and torch here "
        "is another",
        fix="install the build of torch for this GPU from torch's own package index",
    ),
    Symptom(
        pattern=r"undefined symbol|DLL load failed.*procedure",
        cause="ABI mismatch: it was built against another torch",
        fix="install the build made for this torch, or rebuild it with this torch",
    ),
    Symptom(
        pattern=r"GLIBCXX_|CXXABI_|version [`']GLIBC_",
        cause="ABI mismatch: it was built against a newer C++ runtime than this one",
        fix="use the base image that it was built on, or install a newer libstdc++",
    ),
    Symptom(
        pattern=r"lib(cudart|cublas|nvrtc|cuda|amdhip64|hsa-runtime|hipblas)[^ ]*: "
        r"cannot open shared object",
        cause="wrong build: it was built for another CUDA or ROCm than this machine's",
        fix="install the build for this CUDA or ROCm",
    ),
    Symptom(
        pattern=r"lib(torch|c10)[^ ]*: cannot open shared object",
        cause="ABI mismatch: it was built against another torch",
        fix="install the build made for this torch, or rebuild it with this torch",
    ),
    Symptom(
        pattern=r"invalid ELF header|wrong ELF class",
        cause="wrong build: it was built for another processor or system",
        fix="install the build for this machine's processor and system",
    ),
    Symptom(
        pattern=r"No module named '[\w.]+\.(_?cuda|_\w*C)'",
        cause="its compiled part is not there: not built, or for another Python",
        fix="install the build for this Python, or run outside its source tree",
    ),
    Symptom(
        pattern=r"No module named '[\w.]+\.jit\b",
        cause="a JIT build is in progress in another process",
        fix="wait for the build and ask again; delete the lock of a killed one",
    ),
)


def symptom_of(text: str) -> Symptom | None:
    """The first known cause whose words the text has."""
    return next((s for s in SYMPTOMS if re.search(s.pattern, text)), None)
