"""The backend object over the Hopper kernel: light, as the portable one's is."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mla_decode.backend import Cost
from mla_decode.errors import ArgumentError
from mla_decode_triton.backend import TritonAnswers, TritonMLABackend
from mla_decode_triton.hopper.capability import ARCH, CAPABILITY, hopper_refusals
from mla_decode_triton.hopper.grid import (
    WorkspaceSize,
    choose_rows,
    count_multiprocessors,
    count_row_tiles,
    is_swapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.device import DeviceInfo
    from mla_decode.forward_check import CheckedCall
    from mla_decode.mask import Mask
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal

EVIDENCE = "contract kit on an H200, 2026-11-30"
"""What is to be known of the kernel beside where it runs; `docs/reports` has the run."""
MERGE = "merge_kernel"
KERNELS = {
    "many": "asym_kernel",
    "few": "swap_kernel",
    "many fp8": "asym_fp8_kernel",
    "few fp8": "swap_fp8_kernel",
}


def workspace_size(problem: DecodeProblem, device: DeviceInfo) -> WorkspaceSize:
    """What the steps of a problem's builder share on a device."""
    return WorkspaceSize.of(
        [query_len * problem.num_q_heads for query_len in problem.query_lens],
        problem.max_num_reqs,
        count_multiprocessors(device),
    )


def rows_in_use(
    problem: DecodeProblem, query_len: int, device: DeviceInfo
) -> frozenset[int]:
    """Query rows of a program, in all batches that a problem allows."""
    num_rows, units = query_len * problem.num_q_heads, count_multiprocessors(device)
    # A recorded step may be replayed at any length: it is laid out for the longest.
    least = problem.max_model_len if problem.graphs else 0
    batches = (1, least), (problem.max_num_reqs, problem.max_model_len)
    return frozenset(choose_rows(num_rows, *batch, units) for batch in batches)


def kernels_of(problem: DecodeProblem, rows: int) -> tuple[str, str]:
    """The device kernels of one forward by programs of so many rows."""
    name = "few" if is_swapped(rows) else "many"
    return KERNELS[f"{name} fp8" if problem.kv_dtype == "fp8" else name], MERGE


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
        return count_row_tiles(query_len * num_q_heads)


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
    def decode(self) -> Callable[[CheckedCall], None]:
        """Fill the outputs of a checked call of its own builder's."""
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
        rows = max(rows_in_use(problem, problem.max_query_len, device))
        row_tiles = -(-problem.max_query_len * problem.num_q_heads // rows)
        return Cost(
            kv_walks=row_tiles,
            rows=row_tiles * rows,
            launches=2,
            workspace_bytes=workspace_size(problem, device).num_bytes,
        )

    def answers(self, device: DeviceInfo) -> HopperAnswers:
        """What a planner asks."""
        return HopperAnswers(backend=self, device=device)

    def evidence(self, device: DeviceInfo) -> str:
        """Which kernel it is, and where the contract kit passed over it."""
        where = "simulated" if device.assumed else "hardware"
        return f"{where}; the Hopper kernel alone: {EVIDENCE}"

    def prepare_assumed(self, device: DeviceInfo) -> str:
        """Refuse: Gluon has no interpreter.

        Raises:
            ArgumentError: Always.
        """
        raise uninterpretable(device)

    def kernel_names(
        self, problem: DecodeProblem, device: DeviceInfo
    ) -> tuple[str, ...]:
        """The device kernels that calls launch, as a profiler prints them.

        Each attends by one of them and merges by the last; that of large batches is
        the first, where small ones have another.
        """
        in_use = rows_in_use(problem, problem.max_query_len, device)
        pairs = [kernels_of(problem, rows) for rows in sorted(in_use, reverse=True)]
        return (*dict.fromkeys(attention for attention, _ in pairs), MERGE)
