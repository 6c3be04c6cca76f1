"""A backend that serves a problem through another one's rewrites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from mla_decode.backend import BackendBase, Cost
from mla_decode.batch import QueryLenSupport
from mla_decode.builder import MLADecodeMetadataBuilder
from mla_decode.lowering.buffers import PaddedRows, VirtualTables
from mla_decode.mask import Mask
from mla_decode.metadata import CommonAttentionMetadata, DecodeMetadata

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.backend import Backend
    from mla_decode.builder import Validation
    from mla_decode.capability import Capability
    from mla_decode.device import DeviceInfo
    from mla_decode.forward_check import CheckedCall
    from mla_decode.lowering.plan import Plan, Rewrite
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal


@dataclass(slots=True, kw_only=True, eq=False)
class LoweredMetadata(DecodeMetadata):
    """A step's metadata of the inner backend, and the way to it."""

    inner: DecodeMetadata
    block: LoweredBlock


class LoweredBlock:
    """One block of the plan, ready to serve: the inner builder and its buffers."""

    def __init__(
        self,
        problem: DecodeProblem,
        rewrite: Rewrite,
        builder: MLADecodeMetadataBuilder,
    ) -> None:
        self.rewrite = rewrite
        self.builder = builder
        info, device = builder.device_info, builder.device
        self.tables: VirtualTables | None = (
            VirtualTables(problem, rewrite, device) if rewrite.num_virtual > 1 else None
        )
        self.padded: PaddedRows | None = (
            PaddedRows(problem, rewrite, info) if rewrite.pad_rows else None
        )
        step = rewrite.lowered.max_query_len
        count = torch.arange(rewrite.lowered.max_num_reqs + 1, dtype=torch.int32)
        self._starts_cpu = count * step
        self._starts = self._starts_cpu.to(device)

    def build(
        self, table: Tensor, lens: Tensor, max_seq_len: int, totals: Tensor | None
    ) -> DecodeMetadata:
        """Build the inner metadata of one step."""
        if self.tables is not None:
            table, lens = self.tables.fill(table, lens, totals)
        num_reqs = lens.shape[0]
        rewrite = self.rewrite
        query_len = rewrite.lowered.max_query_len
        has_dcp = rewrite.lowered.dcp is not None
        common = CommonAttentionMetadata(
            query_start_loc=self._starts[: num_reqs + 1],
            query_start_loc_cpu=self._starts_cpu[: num_reqs + 1],
            seq_lens=lens,
            num_reqs=num_reqs,
            num_actual_tokens=num_reqs * query_len,
            max_query_len=query_len,
            max_seq_len=max_seq_len,
            block_table_tensor=table,
            causal=rewrite.is_folded or rewrite.mask is Mask.CAUSAL,
            dcp_local_seq_lens=lens if has_dcp else None,
        )
        return self.builder.build(common)


class LoweredBuilder(MLADecodeMetadataBuilder):
    """Builds the inner backend's metadata for the rewritten batch."""

    query_len_support = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode = True
    supports_non_causal_multi_token_dcp = True
    _splits_causal_blocks = True

    inner: ClassVar[Backend]
    plan: ClassVar[Plan]

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        validate: Validation = "host",
    ) -> None:
        super().__init__(problem, device, validate=validate)
        builders: dict[DecodeProblem, MLADecodeMetadataBuilder] = {}
        self._blocks: dict[tuple[int, Mask], LoweredBlock] = {}
        for block in self.plan.blocks:
            rewrite = block.rewrite
            if rewrite.lowered not in builders:
                builders[rewrite.lowered] = self.inner.builder_cls(
                    rewrite.lowered, self.device_info
                )
            self._blocks[rewrite.query_len, rewrite.mask] = LoweredBlock(
                problem, rewrite, builders[rewrite.lowered]
            )

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> LoweredMetadata:
        del query_start_loc_cpu
        query_len = self._decode_query_len
        is_causal = self._decode_causal or query_len == 1
        mask = Mask.CAUSAL if is_causal else Mask.NON_CAUSAL
        block = self._blocks[query_len, mask]
        inner = block.build(
            block_table_tensor, seq_lens_device, max_seq_len, dcp_tot_seq_lens_device
        )
        return LoweredMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_seq_len=max_seq_len,
            num_reqs=seq_lens_device.shape[0],
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            inner=inner,
            block=block,
        )


class LoweredBackend(BackendBase):
    """The plan of a problem, as an ordinary backend that the kit can run.

    Args:
        inner: The backend whose kernels are used; its declaration does not change.
        plan: What `plan_exact` found for the problem.
    """

    def __init__(self, inner: Backend, plan: Plan) -> None:
        self.inner = inner
        self.plan = plan
        self.name: str = inner.name  # type: ignore[misc]  # an instance stands for its inner backend
        self.capability: Capability = inner.capability  # type: ignore[misc]  # as above
        self.deterministic: bool = inner.deterministic  # type: ignore[misc]  # as above
        namespace = {
            "inner": inner,
            "plan": plan,
            "graph_support": inner.builder_cls.graph_support,
        }
        self._builder_cls = type("LoweredBuilder", (LoweredBuilder,), namespace)

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
        block, num_reqs = metadata.block, metadata.num_reqs
        rewrite, lowered = block.rewrite, block.rewrite.lowered
        query = call.q.contiguous()
        if block.padded is not None:
            q, out, lse = block.padded.enter(query, num_reqs)
        else:
            rows = (num_reqs * rewrite.num_virtual * lowered.max_query_len,)
            heads = lowered.num_q_heads
            q = query.view(*rows, heads, query.shape[-1])
            out = call.out.view(*rows, heads, call.out.shape[-1])
            lse = None if call.lse is None else call.lse.view(*rows, heads)
        self.inner.forward(
            q,
            call.kv_cache,
            metadata.inner,
            softmax_scale=call.softmax_scale,
            q_scale=call.q_scale,
            kv_scale=call.kv_scale,
            out=out,
            lse=lse,
        )
        if block.padded is not None:
            block.padded.leave(out, call.out, num_reqs)
            if lse is not None and call.lse is not None:
                block.padded.leave(lse, call.lse, num_reqs)


def apply_plan(inner: Backend, plan: Plan) -> Backend:
    """The backend that serves the plan: the inner one where the plan is native."""
    return inner if plan.kind == "native" else LoweredBackend(inner, plan)
