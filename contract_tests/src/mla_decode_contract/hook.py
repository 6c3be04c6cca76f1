"""What the kit asks of a backend object beyond the contract; all of it is optional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem


@runtime_checkable
class PreparesAssumed(Protocol):
    """A backend that can run where its device is not: simulated or interpreted."""

    def prepare_assumed(self, device: DeviceInfo) -> str:
        """Make the backend runnable on CPU tensors in this process.

        The kit calls it once in each worker process, where tensors will live on the
        CPU, before it reads `builder_cls` and before the kit has imported any kernel,
        Triton or the vendor's library. It installs a simulator for ``device.arch`` and
        ``device.libraries`` (empty: the adapter's default release), or sets what an
        interpreter reads from the environment. Never called on real hardware.

        Returns:
            The evidence word: ``simulated`` or ``interpreted``.

        Raises:
            mla_decode.ArgumentError: This device cannot be prepared.
        """


@runtime_checkable
class NamesKernels(Protocol):
    """A backend that can say which kernels serve a problem; for the report."""

    def kernel_names(self, problem: DecodeProblem, device: DeviceInfo) -> Sequence[str]:
        """Names of the kernels that one step of the problem would launch."""


@runtime_checkable
class NamesLibraries(Protocol):
    """A backend that can say which kernel libraries it uses; for the report."""

    def library_versions(self, device: DeviceInfo) -> Mapping[str, str]:
        """Versions in use, by distribution name, such as ``amd-aiter``."""
