"""Which backend on which device: resolved once in the host, described to workers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_decode.capability import Capability
from mla_decode.device import DeviceInfo, detect_device
from mla_decode.discovery import Candidate, discover
from mla_decode.errors import ArgumentError
from mla_decode_contract.hook import PreparesAssumed

if TYPE_CHECKING:
    from mla_decode.backend import Backend


class UsageProblem(Exception):  # noqa: N818 - the user's error, exit 4
    """What the caller asked for cannot be run; nothing was tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The backend and device of a run; plain enough to send to a worker."""

    backend: str
    """An entry point's name, or ``module:attribute``."""
    device: DeviceInfo
    seed: int = 0
    mutant: str | None = None
    """A wrong wrapper of the backend, by name; None runs the backend itself."""

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON."""
        return {
            "backend": self.backend,
            "device": self.device.as_dict(),
            "seed": self.seed,
            "mutant": self.mutant,
        }

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Target:
        """The inverse of `as_dict`."""
        device = DeviceInfo(**plain["device"])
        return cls(**{**plain, "device": device})

    @property
    def is_on_cpu(self) -> bool:
        """Whether tensors live on the CPU: simulated, interpreted or a CPU backend."""
        return self.device.torch_device == "cpu"

    @property
    def profile(self) -> str:
        """Which cases can run: ``cpu``, or ``device`` (which includes them)."""
        return "cpu" if self.is_on_cpu else "device"


def load_backend(name: str) -> Backend:
    """Load a backend by entry-point name or ``module:attribute``.

    Raises:
        UsageProblem: No such backend, or it cannot be loaded.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            backend: Backend = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UsageProblem(f"cannot load backend {name!r}: {error}") from error
        if not isinstance(getattr(backend, "capability", None), Capability):
            raise UsageProblem(
                f"{name!r} is no backend: it has no capability "
                f"(got: a {type(backend).__name__}; name the backend object)"
            )
        return backend
    candidates = discover()
    candidate = candidates.get(name)
    if candidate is None:
        known = ", ".join(sorted(candidates))
        raise UsageProblem(f"no backend is named {name!r}; known: {known}")
    if candidate.backend is None:
        raise UsageProblem(f"backend {name!r} cannot be loaded: {candidate.refusal}")
    return candidate.backend


def as_candidates(backend: Backend) -> dict[str, Candidate]:
    """The backend as the only candidate of a selection."""
    return {backend.name: Candidate(name=backend.name, backend=backend)}


def resolve_device(
    backend: Backend, *, arch: str | None, assume_arch: str | None
) -> DeviceInfo:
    """Find the device that a run is for.

    Args:
        backend: Whose capability decides.
        arch: Hardware that must be present.
        assume_arch: An architecture to simulate or interpret.

    Raises:
        UsageProblem: Both were given, the hardware is absent, or the backend cannot
            run on that architecture here.
    """
    if arch is not None and assume_arch is not None:
        raise UsageProblem("--arch and --assume-arch exclude each other")
    try:
        if assume_arch is not None:
            device = DeviceInfo.assume(assume_arch)
        else:
            device = detect_device()
    except ArgumentError as error:
        raise UsageProblem(str(error)) from error
    if arch is not None and device.arch != arch:
        raise UsageProblem(
            f"--arch {arch} needs that hardware; this machine has {device.arch} "
            f"(--assume-arch {arch} runs the adapter's simulator)"
        )
    rows = backend.capability.archs
    is_free = arch is None and assume_arch is None
    can_assume = bool(rows) and isinstance(backend, PreparesAssumed)
    if is_free and device.arch == "cpu" and "cpu" not in rows and can_assume:
        device = DeviceInfo.assume(rows[0])
    if device.arch not in rows:
        raise UsageProblem(
            f"{backend.name} declares nothing for {device.arch}; "
            f"it declares {', '.join(rows) or 'no architecture'}"
        )
    can_run = isinstance(backend, PreparesAssumed) or backend.name == "reference"
    if device.assumed and not can_run:
        raise UsageProblem(
            f"{backend.name} has no simulator or interpreter (prepare_assumed): "
            f"run it on {device.arch} hardware"
        )
    return device


def prepare(backend: Backend, device: DeviceInfo) -> str:
    """Make the backend runnable in this process and return the evidence word."""
    if device.torch_device == "cpu" and isinstance(backend, PreparesAssumed):
        return backend.prepare_assumed(device)
    if backend.name == "reference":
        return "reference"
    return "hardware"
