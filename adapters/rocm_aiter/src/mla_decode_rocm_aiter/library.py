"""AITER's functions, as the adapter calls them: the real ones or the simulated ones."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode import BackendRefused, OutdatedLibraryError, Refusal
from mla_decode_rocm_aiter.facts import assumed_release
from mla_decode_rocm_aiter.importing import import_decode
from mla_decode_rocm_aiter.installation import (
    DISTRIBUTION,
    find_installation,
    simulated_release,
)
from mla_decode_rocm_aiter.profiles import first_release_with_causal
from mla_decode_rocm_aiter.simulation import read_variable
from mla_decode_rocm_aiter.sizes import CU_COUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from mla_decode import DeviceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One AITER, imported."""

    release: str
    decode: Callable[..., Any]
    """`aiter.mla.mla_decode_fwd`."""
    build_metadata: Callable[..., Any]
    """`aiter.get_mla_metadata_v1`."""
    metadata_info: Callable[..., Any]
    """`aiter.get_mla_metadata_info_v1`."""
    cus: int
    """Compute units of the device, which bound the splits of one tile."""
    has_causal: bool
    """Whether `decode` takes `causal=`, read from its signature."""
    machine: Any = None
    """The simulated machine, where this AITER is simulated."""

    def require_non_causal(self) -> None:
        """Raise where the installed AITER cannot be told a mask.

        Raises:
            OutdatedLibraryError: `mla_decode_fwd` has no parameter `causal`.
        """
        if not self.has_causal:
            raise outdated(self.release)


def outdated(release: str) -> OutdatedLibraryError:
    """The error that names the installed release and the first one with a mask."""
    return OutdatedLibraryError(
        "The installed AITER decodes causal blocks only: mla_decode_fwd has no "
        "parameter `causal`.",
        library=DISTRIBUTION,
        installed=release,
        first_supported=first_release_with_causal(),
    )


def load_library(device: DeviceInfo | None = None) -> Library:
    """Import the AITER that a device decodes with.

    Args:
        device: An assumed device gets a simulated AITER: the one in `sys.modules` if it
            simulates the same arch and release, else one of its own. None takes
            whatever `import aiter` gives.

    Raises:
        BackendRefused: AITER is absent, is another package, or does not import.
    """
    _install_asked_for()
    if device is not None and device.assumed:
        return _load_simulated(device.arch, assumed_release(device))
    simulated = simulated_release()
    release = simulated[1] if simulated else "unknown"
    installation = None
    if simulated is None and not _is_imported():
        found = find_installation()
        if isinstance(found, Refusal):
            raise refused(found)
        installation, release = found, found.version
    decode = import_decode(installation)
    if isinstance(decode, Refusal):
        raise refused(decode)
    root = importlib.import_module("aiter")
    if simulated is None:
        named = find_installation()
        if not isinstance(named, Refusal):
            release = named.version
    return _from_modules(root, decode, release, _count_cus(device, root))


def _install_asked_for() -> None:
    """Put the AITER that `MLA_DECODE_SIMULATE` names where `import aiter` finds it."""
    asked = read_variable()
    if asked is None or "aiter" in sys.modules:
        return
    from mla_decode_rocm_aiter.simulator import (  # noqa: PLC0415 - only where simulated
        Machine,
        install,
    )

    arch, release = asked
    install(Machine(arch=arch, release=release))


def _is_imported() -> bool:
    """Whether `aiter.mla` is there already, by whatever way it came."""
    return "aiter" in sys.modules and "aiter.mla" in sys.modules


def _load_simulated(arch: str, release: str) -> Library:
    from mla_decode_rocm_aiter.simulator import (  # noqa: PLC0415 - only where simulated
        Machine,
        make_modules,
    )

    if simulated_release() == (arch, release):
        modules: Mapping[str, ModuleType] = sys.modules
    else:
        modules = make_modules(Machine(arch=arch, release=release))
    root = modules["aiter"]
    machine = getattr(root, "__mla_decode_machine__", None)
    cus = machine.cus if machine is not None else CU_COUNTS[arch]
    return _from_modules(root, modules["aiter.mla"].mla_decode_fwd, release, cus)


def _from_modules(
    root: ModuleType, decode: Callable[..., Any], release: str, cus: int
) -> Library:
    return Library(
        release=release,
        decode=decode,
        build_metadata=_function(root, "get_mla_metadata_v1"),
        metadata_info=_function(root, "get_mla_metadata_info_v1"),
        cus=cus,
        has_causal="causal" in inspect.signature(decode).parameters,
        machine=getattr(root, "__mla_decode_machine__", None),
    )


def _function(root: ModuleType, name: str) -> Callable[..., Any]:
    """A function of AITER, or one that says at its call that AITER has none."""
    found = getattr(root, name, None)
    if callable(found):
        function: Callable[..., Any] = found
        return function

    def missing(*_args: object, **_kwargs: object) -> Any:
        raise AttributeError(
            f"aiter has no {name}: its import swallowed a failure; see the first "
            "warning of `python -c 'import aiter'`"
        )

    return missing


def _count_cus(device: DeviceInfo | None, root: ModuleType) -> int:
    machine = getattr(root, "__mla_decode_machine__", None)
    if machine is not None:
        return int(machine.cus)
    import torch  # noqa: PLC0415 - torch is imported where tensors are

    if device is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device.index)
        return int(properties.multi_processor_count)
    return CU_COUNTS["gfx950"]


def refused(*reasons: Refusal) -> BackendRefused:
    """The error of a backend that cannot serve."""
    return BackendRefused("rocm_aiter refuses.", {"rocm_aiter": list(reasons)})
