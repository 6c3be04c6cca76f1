"""A backend that serves a problem through another one's rewrites."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mla_decode.backend import BackendBase, Cost
from mla_decode.lowering.builder import LoweredBuilder, LoweredMetadata

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.backend import Backend, DecodeOutput
    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.capability import Capability
    from mla_decode.device import DeviceInfo
    from mla_decode.forward_check import CheckedCall
    from mla_decode.lowering.plan import Plan
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal


class LoweredBackend(BackendBase):
    """The plan of a problem, as an ordinary backend that the kit can run.

    Args:
        inner: The backend whose kernels are used; its declaration does not change.
        plan: What `plan_exact` found for the problem.
    """

    def __init__(self, inner: Backend, plan: Plan) -> None:
        self.inner = inner
        self.plan = plan
        self.name: str = inner.name
        self.deterministic: bool = inner.deterministic
        namespace = {
            "inner": inner,
            "plan": plan,
            "graph_support": inner.builder_cls.graph_support,
            "host_reads_lengths": inner.builder_cls.host_reads_lengths,
        }
        self._builder_cls = type("LoweredBuilder", (LoweredBuilder,), namespace)

    @property
    def capability(self) -> Capability:
        """The inner backend's: its declaration does not change."""
        return self.inner.capability

    @property
    def builder_cls(self) -> type[MLADecodeMetadataBuilder]:
        """A builder class that knows the plan."""
        return self._builder_cls

    def refusals(self, problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
        """None for the planned problem; the inner backend's for any other."""
        if problem == self.plan.problem:
            return []
        return self.inner.refusals(problem, device)

    def supports_non_causal(self, device: DeviceInfo) -> bool:
        """Whether the planned problem has non-causal blocks: they are served."""
        del device
        return self.plan.problem.needs_non_causal

    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> Cost:
        """The plan's cost."""
        del problem, device
        return self.plan.cost

    def evidence(self, device: DeviceInfo) -> str:
        """The inner backend's: its kernels are what runs."""
        return self.inner.evidence(device)

    def _forward(self, call: CheckedCall) -> None:
        metadata = cast("LoweredMetadata", call.metadata)
        padded = metadata.block.padded
        if padded is None:
            self._run_views(call, metadata)
            return
        num_reqs = metadata.num_reqs
        q, out, lse = padded.enter(call.q.contiguous(), num_reqs)
        self._run(call, q, out, lse)
        padded.leave(out, call.out, num_reqs)
        if lse is not None and call.lse is not None:
            padded.leave(lse, call.lse, num_reqs)

    def _run_views(self, call: CheckedCall, metadata: LoweredMetadata) -> None:
        """Run on views of a contiguous query and of the caller's outputs.

        Where the caller passes none, the inner backend's own are returned as views: a
        fold copies nothing.
        """
        lowered = metadata.block.rewrite.lowered
        rows, heads = metadata.num_decode_tokens, call.builder.problem.num_q_heads
        shape = (rows * heads // lowered.num_q_heads, lowered.num_q_heads)
        out, lse = call.callers_out, call.callers_lse
        found = self._run(
            call,
            call.q.contiguous().view(*shape, -1),
            None if out is None else out.view(*shape, -1),
            None if lse is None else lse.view(*shape),
        )
        if out is None:
            call.out = found.out.view(rows, heads, -1)
        if lse is None and found.lse is not None:
            call.lse = found.lse.view(rows, heads)

    def _run(
        self, call: CheckedCall, q: Tensor, out: Tensor | None, lse: Tensor | None
    ) -> DecodeOutput:
        return self.inner.forward(
            q,
            call.kv_cache,
            cast("LoweredMetadata", call.metadata).inner,
            softmax_scale=call.softmax_scale,
            q_scale=call.q_scale,
            kv_scale=call.kv_scale,
            out=out,
            lse=lse,
        )


def apply_plan(inner: Backend, plan: Plan) -> Backend:
    """The backend that serves the plan: the inner one where the plan is native."""
    return inner if plan.kind == "native" else LoweredBackend(inner, plan)
