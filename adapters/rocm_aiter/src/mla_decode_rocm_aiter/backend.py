"""The backend: AITER's MLA decode behind the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode.backend import BackendBase, CliOption
from mla_decode.device import DeviceInfo
from mla_decode.errors import ArgumentError
from mla_decode_rocm_aiter.answers import AiterAnswers, answers_for
from mla_decode_rocm_aiter.capability import capability_of, present_release
from mla_decode_rocm_aiter.facts import as_simulated, assumed_release, find_facts
from mla_decode_rocm_aiter.gates import supports_non_causal
from mla_decode_rocm_aiter.installation import DISTRIBUTION
from mla_decode_rocm_aiter.profiles import (
    DEFAULT_RELEASE,
    find_profile,
    known_releases,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mla_decode import Capability, Cost, DecodeProblem, Refusal
    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.diagnosis import Finding
    from mla_decode.forward_check import CheckedCall


def _assume_release(device: DeviceInfo, release: str) -> DeviceInfo:
    """The device with another AITER assumed on it."""
    if device.vendor != "rocm" or not device.assumed:
        return device
    return DeviceInfo(
        vendor=device.vendor,
        arch=device.arch,
        assumed=device.assumed,
        index=device.index,
        libraries={**device.libraries, DISTRIBUTION: release},
        name=device.name,
    )


class AiterMLABackend(BackendBase):
    """AITER's assembly MLA decode on gfx942 and gfx950, causal and non-causal.

    Nothing here has run on AMD hardware: dispatch is AITER's own host code, compared
    call by call; kernels are simulated.
    """

    name = "rocm_aiter"
    cli_options = (
        CliOption(
            name="--aiter-release",
            help="The AITER to assume on an assumed AMD device.",
            default=DEFAULT_RELEASE,
            apply=_assume_release,
        ),
    )

    @property
    def capability(self) -> Capability:
        """What the release in sight serves, by arch; 0.1.20.post1 where there is none."""
        return capability_of(present_release())

    @property
    def builder_cls(self) -> type[MLADecodeMetadataBuilder]:
        """The builder; importing it imports torch, and AITER not yet."""
        from mla_decode_rocm_aiter.builder import (  # noqa: PLC0415 - torch stays out of discovery
            AiterMLAMetadataBuilder,
        )

        return AiterMLAMetadataBuilder

    def refusals(self, problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
        """Every reason: the declared row's, the installed AITER's, each block's."""
        return self.answers(device).refusals(problem)

    def supports_non_causal(self, device: DeviceInfo) -> bool:
        """Whether the device's AITER decodes non-causal blocks.

        Raises:
            OutdatedLibraryError: The arch has them in a newer release only.
        """
        return supports_non_causal(as_simulated(device))

    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> Cost:
        """What the problem's dearest block costs; see `AiterAnswers.cost`.

        Raises:
            BackendRefused: The problem is not served here.
        """
        return self.answers(device).cost(problem)

    def answers(self, device: DeviceInfo) -> AiterAnswers:
        """All that the device's AITER answers, as things stand now."""
        return answers_for(as_simulated(device))

    def evidence(self, device: DeviceInfo) -> str:
        """Simulated where the device is assumed; never on AMD, anywhere."""
        device = as_simulated(device)
        return "simulated, never on AMD" if device.assumed else "never on AMD"

    def prepare_assumed(self, device: DeviceInfo) -> str:
        """Put a simulated AITER into this process, for the contract kit.

        Raises:
            ArgumentError: No such arch or release is simulated.
        """
        from mla_decode_rocm_aiter.simulator import (  # noqa: PLC0415 - only where simulated
            Machine,
            install,
        )

        device = as_simulated(device)
        release = assumed_release(device)
        if self.capability.row(device.arch) is None or find_profile(release) is None:
            raise ArgumentError(
                "No AITER of this release is simulated on this arch.",
                got=f"AITER {release} on {device.arch}",
                allowed=f"{', '.join(self.capability.archs)} with one of "
                f"{', '.join(known_releases())}",
                fix="pass a known arch and --aiter-release",
            )
        install(Machine(arch=device.arch, release=release))
        return "simulated"

    def kernel_names(self, problem: DecodeProblem, device: DeviceInfo) -> Sequence[str]:
        """Names of the assembly kernels that the problem's blocks resolve to."""
        routes = self.answers(device).routes(problem).values()
        return sorted({name for route in routes for name in route.key.kernels[:1]})

    def library_versions(self, device: DeviceInfo) -> Mapping[str, str]:
        """The AITER in use."""
        facts = find_facts(as_simulated(device))
        release = getattr(facts, "release", "not found")
        return {DISTRIBUTION: release}

    def diagnose(self, device: DeviceInfo) -> Iterable[Finding]:
        """What `mla-decode doctor` says of the installed AITER, in a child process."""
        from mla_decode_rocm_aiter.diagnose import (  # noqa: PLC0415 - the doctor's alone
            diagnose,
        )

        return diagnose(device)

    def probe(self, *, as_json: bool = False, device: DeviceInfo | None = None) -> int:
        """Try AITER's calls in child processes; what `mla-decode probe` runs.

        Returns:
            An exit code: 1 where an accepted call dies or answers wrongly.
        """
        from mla_decode_rocm_aiter.probe import (  # noqa: PLC0415 - starts processes
            probe,
        )

        return probe(device, as_json=as_json)

    def _forward(self, call: CheckedCall) -> None:
        from mla_decode_rocm_aiter.forward import (  # noqa: PLC0415 - as above
            aiter_forward,
        )

        aiter_forward(call)


backend = AiterMLABackend()
"""The object behind the entry point."""
