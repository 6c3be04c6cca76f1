"""The backend object: what FlashMLA serves, what it costs, and the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode.answers import PlainAnswers
from mla_decode.backend import CliOption, Cost
from mla_decode.device import DeviceInfo
from mla_decode.errors import ArgumentError
from mla_decode.mask import Mask
from mla_decode_cuda_flashmla.forward import FlashMLAForward
from mla_decode_cuda_flashmla.inspection import LibraryRefused
from mla_decode_cuda_flashmla.library import library_for
from mla_decode_cuda_flashmla.limits import (
    ARCH,
    CAPABILITY,
    KERNELS,
    TILE_ROWS,
    num_sm_parts,
)
from mla_decode_cuda_flashmla.refusals import count_sms, refusals
from mla_decode_cuda_flashmla.workspace import builder_bytes, call_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mla_decode.diagnosis import Finding
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal


def _assume_release(device: DeviceInfo, release: str) -> DeviceInfo:
    return DeviceInfo.assume(
        device.arch, libraries={**device.libraries, "flash-mla": release}
    )


class FlashMLAAnswers(PlainAnswers):
    """What the library serves, with the walks of a block known from its rows."""

    def fewest_walks(
        self, problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: int
    ) -> int | None:
        """One walk a tile of 64 rows; none for a block that no kernel masks."""
        del problem
        if mask is Mask.NON_CAUSAL:
            return None
        return -(-query_len * num_q_heads // TILE_ROWS)


class FlashMLABackend(FlashMLAForward):
    """FlashMLA's dense decode on Hopper. Causal only: the mask is not exposed.

    The library has the argument; offering it is a decision of its own. A non-causal
    block reaches these kernels as an exact lowering, one token of Q*H heads.
    """

    name = "cuda_flashmla"
    capability = CAPABILITY
    deterministic = True

    cli_options = (
        CliOption(
            name="--flashmla-release",
            help="FlashMLA release to assume, by date: 2026.4 or 2025.4",
            default=None,
            apply=_assume_release,
        ),
    )

    def refusals(self, problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
        """Every reason: capability, limits, the installed library."""
        return refusals(problem, device)

    def supports_non_causal(self, device: DeviceInfo) -> bool:
        """Never, on any device and with any release of the library."""
        del device
        return False

    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> Cost:
        """One walk a tile of 64 rows; attention and combine, and one more for LSE."""
        num_sms = count_sms(device)
        rows = problem.max_query_len * problem.num_q_heads
        tiles = -(-rows // TILE_ROWS)
        parts = num_sm_parts(rows, num_sms)
        return Cost(
            kv_walks=tiles,
            rows=tiles * TILE_ROWS,
            launches=3 if problem.needs_lse else 2,
            workspace_bytes=builder_bytes(
                problem, serves_empty_rows=_serves_empty_rows(problem, device)
            ),
            index_entries=8 * parts + problem.max_num_reqs + 1,
            call_bytes=call_bytes(problem, num_sms),
        )

    def answers(self, device: DeviceInfo) -> FlashMLAAnswers:
        """What a planner asks."""
        return FlashMLAAnswers(backend=self, device=device)

    def evidence(self, device: DeviceInfo) -> str:
        """``simulated`` for an assumed device, else ``hardware``."""
        return "simulated" if device.assumed else "hardware"

    def prepare_assumed(self, device: DeviceInfo) -> str:
        """Make a described device runnable on the CPU.

        Raises:
            ArgumentError: An architecture or a release that is not modelled.
        """
        if device.arch != ARCH:
            raise ArgumentError(
                "The simulator models one architecture.",
                got=device.arch,
                allowed=ARCH,
                fix=f"assume {ARCH}, or choose a backend of that architecture",
            )
        try:
            library_for(device)
        except LibraryRefused as refused:
            reason = refused.refusal
            raise ArgumentError(
                reason.message, got=reason.got, allowed=reason.allowed, fix=reason.fix
            ) from refused
        return self.evidence(device)

    def library_versions(self, device: DeviceInfo) -> dict[str, str]:
        """Distribution and version of the library, for reports; empty without one."""
        try:
            library = library_for(device)
        except LibraryRefused:
            return {}
        return {library.distribution: library.version}

    def diagnose(self, device: DeviceInfo) -> Iterable[Finding]:
        """What `mla-decode doctor` says of the installed copy, in a child process."""
        from mla_decode_cuda_flashmla.diagnose import (  # noqa: PLC0415 - the doctor's alone
            diagnose,
        )

        return diagnose(device)

    def kernel_names(
        self, problem: DecodeProblem, device: DeviceInfo
    ) -> tuple[str, ...]:
        """The device kernels of one call, as a profiler prints them."""
        del device
        return KERNELS[problem.q_dtype]


def _serves_empty_rows(problem: DecodeProblem, device: DeviceInfo) -> bool:
    """Whether the form in use needs no copies; False, the larger, where none is."""
    try:
        kernel = library_for(device).decode_for(problem.q_dtype)
    except LibraryRefused:
        return False
    return kernel is not None and kernel.serves_empty_rows
