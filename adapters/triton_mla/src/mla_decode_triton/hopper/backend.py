"""The backend object over the Hopper kernel: light, as the portable one's is."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mla_decode.backend import Cost
from mla_decode.errors import ArgumentError
from mla_decode_triton.backend import TritonAnswers, TritonMLABackend
from mla_decode_triton.hopper.capability import ARCH, CAPABILITY, hopper_refusals
from mla_decode_triton.hopper.grid import WorkspaceSize, choose_grid
from mla_decode_triton.tiles import ARCH_TILES

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.device import DeviceInfo
    from mla_decode.forward_check import CheckedCall
    from mla_decode.mask import Mask
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal

MULTIPROCESSORS = ARCH_TILES[ARCH].num_units
"""Of an H100 SXM and an H200: one program each; others serve more than one."""
KERNELS = {
    "many": ("asym_kernel", "merge_kernel"),
    "few": ("swap_kernel", "merge_kernel"),
    "fp8": ("swap_fp8_kernel", "merge_kernel"),
}


def workspace_size(problem: DecodeProblem) -> WorkspaceSize:
    """What the steps of a problem's builder share."""
    return WorkspaceSize.of(
        [query_len * problem.num_q_heads for query_len in problem.query_lens],
        problem.max_num_reqs,
        MULTIPROCESSORS,
    )


def kernels_of(problem: DecodeProblem, query_len: int) -> tuple[str, ...]:
    """The device kernels of one forward, as a profiler prints them."""
    grid = choose_grid(query_len * problem.num_q_heads, MULTIPROCESSORS)
    if problem.kv_dtype == "fp8":
        return KERNELS["fp8"]
    return KERNELS["few" if grid.swapped else "many"]


def uninterpretable(device: DeviceInfo) -> ArgumentError:
    """What to raise where tensors are on the CPU."""
    return ArgumentError(
        "The Hopper kernel cannot be interpreted.",
        got=f"{device.arch}, assumed",
        allowed=f"{ARCH} hardware",
        fix="run it on the card, or take the portable kernel",
    )


class HopperAnswers(TritonAnswers):
    """What the kernel serves, with the walks of a block known from its rows."""

    def fewest_walks(
        self, problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: int
    ) -> int | None:
        """A walk for each tile of rows."""
        del problem, mask
        return choose_grid(query_len * num_q_heads, MULTIPROCESSORS).row_tiles


class HopperMLABackend(TritonMLABackend):
    """The Hopper kernel behind the name of the portable one; refuses all else."""

    capability = CAPABILITY

    @cached_property
    def builder_cls(self) -> type[MLADecodeMetadataBuilder]:
        """The builder."""
        from mla_decode_triton.hopper.builder import (  # noqa: PLC0415 - torch stays out of discovery
            HopperMetadataBuilder,
        )

        return HopperMetadataBuilder

    @cached_property
    def _decode(self) -> Callable[[CheckedCall], None]:
        from mla_decode_triton.hopper.builder import decode  # noqa: PLC0415 - as above

        return decode

    def refusals(self, problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
        """Every reason: the capability's, the variants' limits, and Triton's release."""
        return hopper_refusals(problem, device)

    def supports_non_causal(self, device: DeviceInfo) -> bool:
        """On Hopper: the mask is a comparison of the kernel's."""
        return device.arch == ARCH

    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> Cost:
        """A walk for each tile of rows, read from memory once; always two launches."""
        del device
        grid = choose_grid(problem.max_query_len * problem.num_q_heads, MULTIPROCESSORS)
        return Cost(
            kv_walks=grid.row_tiles,
            rows=grid.row_tiles * grid.rows,
            launches=2,
            workspace_bytes=workspace_size(problem).num_bytes,
        )

    def answers(self, device: DeviceInfo) -> HopperAnswers:
        """What a planner asks."""
        return HopperAnswers(backend=self, device=device)

    def evidence(self, device: DeviceInfo) -> str:
        """Which kernel it is, and how little is known of it."""
        where = "simulated" if device.assumed else "hardware"
        return f"{where}, the Hopper kernel on request, never timed"

    def prepare_assumed(self, device: DeviceInfo) -> str:
        """Refuse: Gluon has no interpreter.

        Raises:
            ArgumentError: Always.
        """
        raise uninterpretable(device)

    def kernel_names(
        self, problem: DecodeProblem, device: DeviceInfo
    ) -> tuple[str, ...]:
        """The device kernels of one call, as a profiler prints them."""
        del device
        return kernels_of(problem, problem.max_query_len)
