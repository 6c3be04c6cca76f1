"""One backend over both kernels: the Hopper one wherever it serves a problem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from mla_decode_triton.backend import TritonAnswers, TritonMLABackend
from mla_decode_triton.hopper.backend import EVIDENCE, MERGE, HopperMLABackend
from mla_decode_triton.hopper.capability import (
    ARCH,
    problem_refusals,
    triton_refusals,
)
from mla_decode_triton.hopper.grid import count_row_tiles

if TYPE_CHECKING:
    from mla_decode.backend import Cost
    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.device import DeviceInfo
    from mla_decode.forward_check import CheckedCall
    from mla_decode.mask import Mask
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal
    from mla_decode_triton.auto_builder import AutoBuilder

PORTABLE, HOPPER = TritonMLABackend(), HopperMLABackend()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which kernel serves all block lengths of a problem on a device, and why."""

    backend: TritonMLABackend
    """`PORTABLE` or `HOPPER`."""
    reasons: tuple[Refusal, ...]
    """Why a card of Hopper's takes the portable kernel: none where it takes the Hopper
    one, which an assumed device does not since Gluon has no interpreter, and none of
    other architectures, where nothing is passed over."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """The reasons in words; what to do about them is the caller's own matter."""
        return tuple(
            f"[{reason.code}] {reason.message} "
            f"(got {reason.got}; allowed: {reason.allowed})"
            for reason in self.reasons
        )


def choose(problem: DecodeProblem, device: DeviceInfo) -> Choice:
    """Choose the kernel of a problem's builder: nothing is asked but on Hopper.

    Args:
        problem: Of all block lengths: one kernel serves them, or the other does.
        device: Where it runs. The installed Triton counts, if it is assumed as well;
            that none is installed counts on a card alone.
    """
    if device.arch != ARCH:
        return Choice(backend=PORTABLE, reasons=())
    lacks = triton_refusals(assumed=device.assumed)
    reasons = (*problem_refusals(problem, device), *lacks)
    is_hopper = not reasons and not device.assumed
    return Choice(backend=HOPPER if is_hopper else PORTABLE, reasons=reasons)


class AutoAnswers(TritonAnswers):
    """What the two kernels serve on a Hopper card."""

    def fewest_walks(
        self, problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: int
    ) -> int | None:
        """The fewer of both kernels', where either may serve."""
        walks = super().fewest_walks(problem, query_len, mask, num_q_heads)
        if walks is None or triton_refusals():
            return walks
        return min(walks, count_row_tiles(query_len * num_q_heads))


class AutoTritonBackend(TritonMLABackend):
    """Refuses what the portable kernel refuses: it serves all that the other one does."""

    @cached_property
    def builder_cls(self) -> type[MLADecodeMetadataBuilder]:
        """A class whose objects are builders of the kernel that serves."""
        from mla_decode_triton.auto_builder import (  # noqa: PLC0415 - torch stays out of discovery
            AutoBuilder,
        )

        return AutoBuilder

    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> Cost:
        """That of the kernel that serves the problem."""
        return choose(problem, device).backend.cost(problem, device)

    def answers(self, device: DeviceInfo) -> TritonAnswers:
        """What a planner asks; only a Hopper card has the bounds of either kernel."""
        on_hopper = device.arch == ARCH and not device.assumed
        answers = AutoAnswers if on_hopper else TritonAnswers
        return answers(backend=self, device=device)

    def evidence(self, device: DeviceInfo) -> str:
        """What ran where, and what is known of the Hopper kernel where that may serve."""
        word = PORTABLE.evidence(device)
        if device.arch != ARCH or triton_refusals(assumed=device.assumed):
            return word
        where = "where a card takes it" if device.assumed else "where it serves"
        return f"{word}; the Hopper kernel, {where}: {EVIDENCE}"

    def notes(self, problem: DecodeProblem, device: DeviceInfo) -> list[str]:
        """On Hopper a line of `explain`: which kernel serves, and why not its own."""
        if device.arch != ARCH:
            return []
        chosen = choose(problem, device)
        names = _in_words(chosen.backend.kernel_names(problem, device))
        if chosen.backend is HOPPER:
            return [f"kernel: the Hopper one ({names})"]
        line = f"kernel: the portable one ({names})"
        if chosen.reasons:
            why = "; ".join(chosen.passed_over)
            return [f"{line}; the Hopper one is passed over: {why}"]
        theirs = _in_words(HOPPER.kernel_names(problem, device))
        needs = "".join(f" with {lack.allowed}" for lack in triton_refusals())
        takes = f"a card{needs} would take the Hopper one ({theirs})"
        return [f"{line}, interpreted; {takes}"]

    def kernel_names(
        self, problem: DecodeProblem, device: DeviceInfo
    ) -> tuple[str, ...]:
        """The device kernels of one call, as a profiler prints them."""
        return choose(problem, device).backend.kernel_names(problem, device)

    def _forward(self, call: CheckedCall) -> None:
        cast("AutoBuilder", call.builder).serving.decode(call)


def _in_words(kernels: tuple[str, ...]) -> str:
    """The kernels that attend, of which a call takes one, and the one that merges."""
    attending = " or ".join(name for name in kernels if name != MERGE)
    return f"{attending} + {MERGE}" if MERGE in kernels else attending
