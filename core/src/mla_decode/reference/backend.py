"""The reference backend's declaration, builder and forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode.backend import BackendBase, Cost
from mla_decode.capability import (
    Capability,
    CapabilityRow,
    Feature,
    Source,
    Support,
)
from mla_decode.mask import Mask
from mla_decode.problem import KV_DTYPES, OUT_DTYPES, Q_DTYPES

if TYPE_CHECKING:
    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.device import DeviceInfo
    from mla_decode.forward_check import CheckedCall
    from mla_decode.problem import DecodeProblem

_ANY = range(1, 1 << 20)
_ARCHS = (
    "cpu",
    "gfx90a",
    "gfx942",
    "gfx950",
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_100",
    "sm_103",
    "sm_120",
)


def _row(arch: str) -> CapabilityRow:
    return CapabilityRow(
        arch=arch,
        dtypes=frozenset((q, kv) for q in Q_DTYPES for kv in KV_DTYPES),
        out_dtypes=frozenset(OUT_DTYPES),
        page_sizes=_ANY,
        num_q_heads=_ANY,
        query_lens={Mask.CAUSAL: _ANY, Mask.NON_CAUSAL: _ANY},
        features={
            Feature.LSE: Support.YES,
            Feature.DCP: Support.YES,
            Feature.GRAPHS: Support.HARDWARE_CANNOT
            if arch == "cpu"
            else Support.NOT_IMPLEMENTED,
            Feature.PAGE_STRIDE: Support.YES,
            Feature.SPLIT_CAP: Support.YES,
            Feature.BATCH_INVARIANCE: Support.YES,
        },
        source=Source.DECLARED,
    )


class ReferenceBackend(BackendBase):
    """Torch on any device; auto's choice on the CPU, by name only on a GPU."""

    name = "reference"
    capability: Capability = Capability(rows=tuple(_row(arch) for arch in _ARCHS))

    @property
    def builder_cls(self) -> type[MLADecodeMetadataBuilder]:
        """The builder: lengths are read on the host once a build."""
        from mla_decode.reference.builder import (  # noqa: PLC0415 - torch stays out of discovery
            ReferenceMetadataBuilder,
        )

        return ReferenceMetadataBuilder

    def supports_non_causal(self, device: DeviceInfo) -> bool:
        """Always: the mask is a comparison."""
        return self.capability.row(device.arch) is not None

    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> Cost:
        """One walk a call, whatever the block."""
        del device
        rows = problem.max_query_len * problem.num_q_heads
        return Cost(
            kv_walks=1,
            rows=rows,
            launches=10,
            workspace_bytes=0,
        )

    def evidence(self, device: DeviceInfo) -> str:
        """It is the definition that others are measured against."""
        del device
        return "reference"

    def _forward(self, call: CheckedCall) -> None:
        from mla_decode.reference.forward import (  # noqa: PLC0415 - as above
            reference_forward,
        )

        reference_forward(call)
