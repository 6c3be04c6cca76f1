"""Which torch is installed, and whether this build of it fits the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from mla_decode.diagnosis.children import PATIENCE_S, ask_child
from mla_decode.diagnosis.finding import Finding, Level
from mla_decode.diagnosis.symptoms import symptom_of

if TYPE_CHECKING:
    from mla_decode.diagnosis.machine import Machine

_ASK = """
import sys
import torch
from mla_decode.diagnosis.children import say
gpu = torch.cuda.is_available()
properties = torch.cuda.get_device_properties(0) if gpu else None
arch = ""
if gpu and torch.version.hip:
    arch = properties.gcnArchName.split(":")[0]
elif gpu:
    arch = f"sm_{properties.major}{properties.minor}"
say(
    version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip,
    where=torch.__file__, arch=arch, name=properties.name if gpu else "",
    archs=torch.cuda.get_arch_list() if gpu else [],
)
"""
_WORDS = {"cuda": "CUDA", "rocm": "ROCm", "cpu": "CPU"}
_HOSTS = {"cuda": "an NVIDIA host", "rocm": "an AMD host"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The torch of this environment, as a child process saw it."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    where: str = ""
    arch: str = ""
    """Of the first GPU that it sees; empty where it sees none."""
    name: str = ""
    """That GPU's product name."""
    archs: tuple[str, ...] = field(default=())
    """Architectures that it has kernels for."""

    @property
    def vendor(self) -> str:
        """What it was built for: ``cuda``, ``rocm`` or ``cpu``."""
        if self.hip:
            return "rocm"
        return "cuda" if self.cuda else "cpu"


def ask_torch(timeout_s: float = PATIENCE_S) -> TorchBuild | Finding:
    """Import torch in a child process, or say why it cannot be imported."""
    answer = ask_child(_ASK, timeout_s=timeout_s)
    if not answer.said:
        symptom = symptom_of(answer.trouble)
        return Finding(
            level=Level.ERROR,
            what=f"torch cannot be imported{f': {symptom.cause}' if symptom else ''}",
            got=answer.trouble,
            fix="run `python -c 'import torch'` here; reinstall the torch build for "
            "this machine, and rename a file or folder named torch beside you",
        )
    (said,) = answer.said
    return TorchBuild(**{**said, "archs": tuple(said["archs"])})


def wrong_torch(library: str, vendor: str, level: Level) -> Finding | None:
    """A torch that was not built for the accelerators that a library drives.

    Imports torch, so that it is for the doctor's children alone.

    Args:
        library: Its name, for people.
        vendor: What the library needs torch to be built for: ``cuda`` or ``rocm``.
        level: How much it matters on this device.
    """
    import torch  # noqa: PLC0415 - a broken torch is an earlier finding's

    build = TorchBuild(
        version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip
    )
    if build.vendor == vendor:
        return None
    return Finding(
        level=level,
        what=f"{library} needs a {_WORDS[vendor]} build of torch, and this one is a "
        f"{_WORDS[build.vendor]} build",
        got=f"torch {build.version}, {torch.__file__}",
        fix=f"install torch's {_WORDS[vendor]} build from torch's own package index",
    )


def torch_findings(
    torch: TorchBuild, machine: Machine, *, elsewhere: bool = False
) -> tuple[Finding, ...]:
    """Whether the build is the one for the machine, and sees its GPU.

    Args:
        torch: The build.
        machine: What it should fit.
        elsewhere: Whether the machine is one that was named, and its GPU need not be
            here.
    """
    got = f"torch {torch.version} ({_WORDS[torch.vendor]} build)"
    if machine.vendor not in {"cpu", torch.vendor}:
        host = _HOSTS[machine.vendor]
        return (
            Finding(
                level=Level.ERROR,
                what=f"torch is a {_WORDS[torch.vendor]} build on {host}",
                got=f"{got}; {machine.arch or machine.vendor}: {machine.source}",
                fix=f"install torch's {_WORDS[machine.vendor]} build from torch's own "
                "package index, alone: merged indexes pick any build",
            ),
        )
    found = Finding(level=Level.OK, what=got, got=torch.where)
    if machine.vendor != "cpu" and not torch.arch and elsewhere:
        what = "torch sees no GPU here; the arch was named, and may be elsewhere"
        return found, Finding(level=Level.WARN, what=what, got=machine.source)
    if machine.vendor != "cpu" and not torch.arch:
        return (
            Finding(
                level=Level.ERROR,
                what="torch sees no GPU although the build fits",
                got=f"{got}; {machine.source}",
                fix="check the driver's version, CUDA_VISIBLE_DEVICES and "
                "HIP_VISIBLE_DEVICES, and that the container passes the GPU through",
            ),
        )
    if torch.arch and not _has_kernels(torch):
        lacks = Finding(
            level=Level.ERROR,
            what=f"this build of torch has no kernels for {torch.arch}",
            got=", ".join(torch.archs),
            fix=f"install a torch build whose list names {torch.arch}",
        )
        return found, lacks
    return (found,)


def _has_kernels(torch: TorchBuild) -> bool:
    """Exact on AMD; on NVIDIA code of a lower minor of the same major runs too."""
    if torch.vendor == "rocm":
        return torch.arch in {arch.split(":")[0] for arch in torch.archs}
    major = torch.arch[:-1]
    known = (arch.replace("compute_", "sm_") for arch in torch.archs)
    return any(arch.startswith(major) for arch in known)


def triton_finding() -> Finding:
    """Triton's version, held to the one that torch asks for; by metadata alone."""
    try:
        installed = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return Finding(
            level=Level.OK,
            what="Triton is not installed",
            got="a GPU build of torch brings its own",
        )
    for wanted in _torch_wants_of("triton"):
        if not wanted.specifier.contains(installed, prereleases=True):
            return Finding(
                level=Level.ERROR,
                what="Triton is not the one that torch asks for",
                got=f"triton {installed}",
                fix=f"pip install '{wanted.name}{wanted.specifier}'",
            )
    return Finding(level=Level.OK, what=f"triton {installed}")


def _torch_wants_of(name: str) -> list[Requirement]:
    try:
        lines = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        lines = []
    wanted = [Requirement(line) for line in lines]
    return [
        w
        for w in wanted
        if w.name == name and (w.marker is None or w.marker.evaluate())
    ]
