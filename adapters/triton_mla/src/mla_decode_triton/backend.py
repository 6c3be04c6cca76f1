"""The backend object: light, so that asking it costs no Triton and no GPU."""

from __future__ import annotations

from functools import cached_property
from importlib import metadata as importlib_metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mla_decode.answers import PlainAnswers
from mla_decode.backend import BackendBase, Cost
from mla_decode.errors import ArgumentError
from mla_decode.refusal import Refusal, RefusalCode
from mla_decode_triton.capability import CAPABILITY
from mla_decode_triton.planning import plan_step, workspace_bytes
from mla_decode_triton.tiles import ARCH_TILES

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.device import DeviceInfo
    from mla_decode.forward_check import CheckedCall
    from mla_decode.mask import Mask
    from mla_decode.problem import DecodeProblem


class TritonAnswers(PlainAnswers):
    """What the kernels serve, with the walks of a block known from its rows."""

    def fewest_walks(
        self, problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: int
    ) -> int | None:
        """A walk for each of the largest tiles that may take the rows."""
        del mask
        arch = ARCH_TILES.get(self.device.arch)
        if arch is None:
            return None
        return -(-query_len * num_q_heads // arch.most_rows(problem.kv_dtype))


class TritonMLABackend(BackendBase):
    """Portable Triton kernels: NVIDIA and AMD, both masks, a block in one walk."""

    name = "triton_mla"
    capability = CAPABILITY
    takes_query_pair = True

    @cached_property
    def builder_cls(self) -> type[MLADecodeMetadataBuilder]:
        """The builder."""
        from mla_decode_triton.builder import (  # noqa: PLC0415 - torch stays out of discovery
            TritonMLAMetadataBuilder,
        )

        return TritonMLAMetadataBuilder

    @cached_property
    def decode(self) -> Callable[[CheckedCall], None]:
        """Fill the outputs of a checked call of its own builder's."""
        from mla_decode_triton.forward import decode  # noqa: PLC0415 - as above

        return decode

    def refusals(self, problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
        """Every reason: the capability's, and a missing Triton."""
        reasons = super().refusals(problem, device)
        if not device.assumed and find_spec("triton") is None:
            reasons.append(
                Refusal(
                    code=RefusalCode.DEPENDENCY,
                    message="Triton is not installed",
                    got="no module triton",
                    allowed="the triton that this build of torch requires",
                    fix="pip install triton, or a torch build for this GPU",
                )
            )
        return reasons

    def supports_non_causal(self, device: DeviceInfo) -> bool:
        """Wherever there are kernels: the mask is a comparison of theirs."""
        return device.arch in ARCH_TILES

    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> Cost:
        """A walk for each tile of rows; the merge is a second launch."""
        arch = ARCH_TILES[device.arch]
        plan = plan_step(
            problem,
            arch,
            num_reqs=problem.max_num_reqs,
            query_len=problem.max_query_len,
            max_seq_len=problem.max_model_len,
        )
        return Cost(
            kv_walks=plan.row_tiles,
            rows=plan.row_tiles * plan.tile.rows,
            launches=1 if plan.num_splits == 1 else 2,
            workspace_bytes=workspace_bytes(problem, arch),
        )

    def answers(self, device: DeviceInfo) -> TritonAnswers:
        """What a planner asks."""
        return TritonAnswers(backend=self, device=device)

    def evidence(self, device: DeviceInfo) -> str:
        """What ran where; no AMD device has run these kernels."""
        word = "interpreted" if device.assumed else "hardware"
        return f"{word}, never on AMD" if device.vendor == "rocm" else word

    def prepare_assumed(self, device: DeviceInfo) -> str:
        """Check that a described device can be interpreted: it needs Triton alone.

        Raises:
            ArgumentError: No kernels for the architecture, or no Triton here.
        """
        if device.arch not in ARCH_TILES:
            raise ArgumentError(
                "There are no tiles for this architecture.",
                got=device.arch,
                allowed=", ".join(ARCH_TILES),
                fix="assume one of these",
            )
        if find_spec("triton") is None:
            raise ArgumentError(
                "Interpreting a kernel needs Triton.",
                got="no module triton",
                allowed="triton 3.6 or newer",
                fix="pip install triton",
            )
        return "interpreted"

    def library_versions(self, device: DeviceInfo) -> dict[str, str]:
        """Triton's version, for reports; empty without one."""
        del device
        try:
            return {"triton": importlib_metadata.version("triton")}
        except importlib_metadata.PackageNotFoundError:
            return {}

    def kernel_names(
        self, problem: DecodeProblem, device: DeviceInfo
    ) -> tuple[str, ...]:
        """The device kernels of one call, as a profiler prints them."""
        launches = self.cost(problem, device).launches
        return ("decode_kernel", "merge_kernel")[:launches]

    def _forward(self, call: CheckedCall) -> None:
        self.decode(call)
