"""The object that an engine holds per layer group and ubatch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mla_decode.device import as_device_info
from mla_decode.lowering.backend import apply_plan
from mla_decode.selection import select
from mla_decode.self_check import self_check
from mla_decode.step_report import StepReport, report_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from mla_decode.backend import Backend, DecodeOutput, Query
    from mla_decode.builder import MLADecodeMetadataBuilder, Validation
    from mla_decode.device import DeviceInfo
    from mla_decode.discovery import Candidate
    from mla_decode.metadata import CommonAttentionMetadata, DecodeMetadata
    from mla_decode.problem import DecodeProblem
    from mla_decode.selection import Lowering, Selection


class MLADecoder:
    """Decodes a layer group through the backend that serves its problem.

    Args:
        problem: What the layer group asks: every block length and mask of serving.
        backend: A backend's name, or ``"auto"`` for the documented order.
        lowering: ``"exact"`` allows exact rewrites where no kernel serves a block.
        device: Where tensors live; None picks this machine's first accelerator.
        validate: ``"device"`` also checks lengths, tables and fp8 scales, with syncs.
        check_values: Decode tiny random blocks at construction and compare them with
            the float64 oracle: a kernel or a rewrite that is wrong here is refused.
        candidates: Backends to choose from; by default the installed ones.
        workspace_limit_bytes: Device memory that the builder and its calls may take at
            most: what could take more is refused before anything is allocated. None:
            no limit. `selection.workspace` says what is taken.

    Raises:
        BackendRefused: Nobody serves the problem; every reason is in it.
        OutdatedLibraryError: See `select`.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        backend: str = "auto",
        lowering: Lowering = "refuse",
        *,
        device: DeviceInfo | torch.device | str | None = None,
        validate: Validation = "host",
        check_values: bool = False,
        candidates: Mapping[str, Candidate] | None = None,
        workspace_limit_bytes: int | None = None,
    ) -> None:
        self.problem = problem
        self.device: DeviceInfo = as_device_info(device)
        self.selection: Selection = select(
            problem,
            self.device,
            backend,
            lowering,
            candidates=candidates,
            workspace_limit_bytes=workspace_limit_bytes,
        )
        self.backend: Backend = apply_plan(self.selection.backend, self.selection.plan)
        self.builder: MLADecodeMetadataBuilder = self.backend.builder_cls(
            problem, self.device, validate=validate
        )
        if check_values:
            self_check(self.backend, self.builder)
        self.calls: Counter[str] = Counter()
        """Calls of `run` by mask: ``causal``, ``non_causal``."""
        self._last: DecodeMetadata | None = None

    def plan(self, common: CommonAttentionMetadata) -> DecodeMetadata:
        """Build this step's metadata; all layers of the group share it.

        Raises:
            MaskError, BatchError, BackendRefused: As the builder's `build`.
        """
        self._last = self.builder.build(common)
        return self._last

    def plan_for_capture(self, common: CommonAttentionMetadata) -> DecodeMetadata:
        """Build what a graph records; replays follow later `plan` calls."""
        self._last = self.builder.build_for_capture(common)
        return self._last

    def run(
        self,
        q: Query,
        kv_cache: Tensor,
        plan: DecodeMetadata,
        *,
        softmax_scale: float,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> DecodeOutput:
        """Attend one layer's query over its cache; see `BackendBase.forward`."""
        output = self.backend.forward(
            q,
            kv_cache,
            plan,
            softmax_scale=softmax_scale,
            q_scale=q_scale,
            kv_scale=kv_scale,
            out=out,
            lse=lse,
        )
        self.calls[plan.mask.value] += 1
        return output

    def report(self) -> StepReport | None:
        """What served the last planned step; None before the first.

        Made here, on the host, from what `plan` kept: neither `plan` nor `run` pays
        for it, and nothing waits for the device.
        """
        if self._last is None:
            return None
        return report_step(self._last, self.selection, self.backend, self.device)
