"""The device that a problem is to run on: this machine's, or one that is described."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mla_decode.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

_NO_LIBRARIES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A device by vendor and architecture; it needs no torch and no hardware."""

    vendor: str
    """``cuda``, ``rocm`` or ``cpu``."""
    arch: str
    """The vendor's name: ``gfx942``, ``gfx950``, ``sm_90``, ``sm_100``, ``cpu``."""
    assumed: bool = False
    """True where the device is described and not present: tensors live on the CPU."""
    index: int = 0
    """The device's number on this machine."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions of kernel libraries to assume, by distribution name (``amd-aiter``)."""
    name: str = ""
    """The product's name, where one is known."""

    def __post_init__(self) -> None:
        """Freeze the libraries and refuse an architecture without a vendor."""
        if vendor_of(self.arch) != self.vendor:
            raise ArgumentError(
                "The architecture is not one of that vendor.",
                got=f"{self.vendor} {self.arch}",
                allowed="cpu cpu, cuda sm_NN, rocm gfxNNN",
                fix="use DeviceInfo.assume(arch), which finds the vendor",
            )
        object.__setattr__(self, "libraries", MappingProxyType(dict(self.libraries)))

    def __hash__(self) -> int:
        """Hash by value: a device is a key of plan caches."""
        libraries = tuple(sorted(self.libraries.items()))
        return hash((self.vendor, self.arch, self.assumed, self.index, libraries))

    def __reduce__(self) -> tuple[Callable[..., DeviceInfo], tuple[dict[str, Any]]]:
        """Pickle by value: a mapping proxy cannot be, and engines ship their config."""
        return _restore, (self.as_dict(),)

    @classmethod
    def assume(
        cls, arch: str, *, libraries: Mapping[str, str] = _NO_LIBRARIES
    ) -> DeviceInfo:
        """Describe a device that this machine need not have.

        Raises:
            ArgumentError: ``arch`` is no architecture name of a known vendor.
        """
        vendor = vendor_of(arch)
        return cls(
            vendor=vendor, arch=arch, assumed=vendor != "cpu", libraries=libraries
        )

    @property
    def torch_device(self) -> str:
        """Where tensors of this device live, in torch's words."""
        if self.assumed or self.vendor == "cpu":
            return "cpu"
        return f"cuda:{self.index}"

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        return {
            "vendor": self.vendor,
            "arch": self.arch,
            "assumed": self.assumed,
            "index": self.index,
            "libraries": dict(self.libraries),
            "name": self.name,
        }


def _restore(fields: dict[str, Any]) -> DeviceInfo:
    return DeviceInfo(**fields)


def vendor_of(arch: str) -> str:
    """The vendor whose architecture name this is: ``cpu``, ``cuda`` or ``rocm``.

    Raises:
        ArgumentError: The name has no known form.
    """
    if arch == "cpu":
        return "cpu"
    if re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        return "cuda"
    if re.fullmatch(r"gfx[0-9a-f]{3,5}", arch):
        return "rocm"
    raise ArgumentError(
        "The architecture name has no known form.",
        got=repr(arch),
        allowed="cpu, sm_NN (sm_90), gfxNNN (gfx942)",
        fix="use the vendor's name of the architecture: gfx942 is MI300X, gfx950 MI355X, "
        "sm_90 H100 and H200, sm_100 B200",
    )


def detect_device(device: torch.device | str | int | None = None) -> DeviceInfo:
    """Describe a device of this machine; without an argument its first accelerator.

    Args:
        device: A torch device, its name, or an index; None picks ``cuda:0`` (AMD's
            too: torch names it so) where one is present and the CPU elsewhere.

    Raises:
        ArgumentError: The device is of a kind that no vendor here has, or is absent.
    """
    import torch  # noqa: PLC0415 - describing a device must not need torch

    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    which = _torch_device(device)
    if which.type == "cpu":
        return DeviceInfo(vendor="cpu", arch="cpu")
    if which.type != "cuda":
        raise ArgumentError(
            "No backend runs on this kind of device.",
            got=str(which),
            allowed="cpu or cuda (AMD GPUs are cuda devices to torch)",
            fix="move the cache to a supported device",
        )
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (which.index or 0) >= num_gpus:
        raise ArgumentError(
            "torch sees no such GPU on this machine.",
            got=str(which),
            allowed=", ".join(["cpu", *(f"cuda:{i}" for i in range(num_gpus))]),
            fix="install a torch build for your GPU, or use DeviceInfo.assume(arch)",
        )
    return _detect_gpu(which)  # pragma: no cover - needs a GPU


def _torch_device(device: torch.device | str | int) -> torch.device:
    import torch  # noqa: PLC0415 - describing a device must not need torch

    if type(device) is int:
        device = f"cuda:{device}"
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            "torch knows no device of this name.",
            got=repr(device),
            allowed='a torch.device, a name such as "cuda:0" or "cpu", an index',
            fix="use DeviceInfo.assume(arch) to describe a machine by architecture",
        ) from error


def _detect_gpu(which: torch.device) -> DeviceInfo:  # pragma: no cover - needs a GPU
    import torch  # noqa: PLC0415 - describing a device must not need torch

    index = torch.cuda.current_device() if which.index is None else which.index
    found = torch.cuda.get_device_properties(index)
    return _describe(found, index=index, is_rocm=bool(torch.version.hip))


def _describe(properties: Any, *, index: int, is_rocm: bool) -> DeviceInfo:
    """A GPU by what torch says of it; AMD's names carry features behind a colon."""
    if is_rocm:
        vendor, arch = "rocm", str(properties.gcnArchName).split(":", maxsplit=1)[0]
    else:
        vendor, arch = "cuda", f"sm_{properties.major}{properties.minor}"
    return DeviceInfo(vendor=vendor, arch=arch, index=index, name=properties.name)


def as_device_info(device: DeviceInfo | torch.device | str | None) -> DeviceInfo:
    """Take a description as it is, detect anything else."""
    return device if isinstance(device, DeviceInfo) else detect_device(device)
