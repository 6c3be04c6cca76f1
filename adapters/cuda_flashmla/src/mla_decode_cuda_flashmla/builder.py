"""The builder: what one step's calls share, with the schedule that the first one makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from mla_decode.batch import QueryLenSupport
from mla_decode.builder import GraphSupport, MLADecodeMetadataBuilder
from mla_decode.dtypes import torch_dtype
from mla_decode.errors import BackendRefused
from mla_decode.metadata import DecodeMetadata, StepFacts
from mla_decode_cuda_flashmla.batches import BatchShape
from mla_decode_cuda_flashmla.caches import CheckedCaches
from mla_decode_cuda_flashmla.capture import (
    current_capture,
    simulated_capture,
    stream_getter,
)
from mla_decode_cuda_flashmla.finishing import Finisher
from mla_decode_cuda_flashmla.inspection import LibraryRefused
from mla_decode_cuda_flashmla.library import library_for
from mla_decode_cuda_flashmla.limits import KERNELS, num_sm_parts
from mla_decode_cuda_flashmla.refusals import count_sms, refusals

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mla_decode.builder import Validation
    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem
    from mla_decode_cuda_flashmla.finishing import Finish
    from mla_decode_cuda_flashmla.forms import BoundDecode, DenseDecode


@dataclass(slots=True, kw_only=True, eq=False)
class FlashMLAMetadata(DecodeMetadata):
    """One step's batch as the kernel reads it, and its schedules."""

    kernel: DenseDecode
    kernel_table: Tensor
    """int32 [num_reqs, width >= 1]."""
    kernel_lens: Tensor
    """int32 [num_reqs]: seq_lens, at least 1 where the kernel cannot serve 0."""
    empty: Tensor | None
    """bool [num_reqs, 1, 1, 1]: requests without keys; None where the kernel knows."""
    shape: BatchShape
    """What a call's tensors look like."""
    finish: Finish | None
    """What ends a call with LSE; None: torch's operators."""
    current_capture: Callable[[], int]
    """Tells the graph capture that a call is part of."""
    calls: dict[int, BoundDecode] = field(default_factory=dict)
    """By capture: all layers of a step share one schedule, each graph has its own."""

    def facts(self) -> StepFacts:
        """The kernels of the query's dtype; the schedule, and so the splits, is theirs."""
        builder = cast("FlashMLAMetadataBuilder", self.builder)
        problem = builder.problem
        path = f"form {self.kernel.form}, a tile schedule over the whole batch"
        if self.finish is not None:
            path += ", LSE and the caller's out by one kernel of Triton's"
        elif problem.needs_lse:
            path += ", LSE and the caller's out by torch's operators"
        return StepFacts(
            kernels=KERNELS[problem.q_dtype],
            path=path,
            num_q_heads=problem.num_q_heads,
            query_len=self.query_len,
            downgrades=(builder.no_finisher,) if builder.no_finisher else (),
            max_splits=num_sm_parts(
                self.shape.num_rows, count_sms(builder.device_info)
            ),
        )

    def call(self) -> BoundDecode:
        """This step's call within the current capture, planned on first use."""
        capture = self.current_capture()
        found = self.calls.get(capture)
        if found is None:
            kernel, lens = self.kernel, self.kernel_lens
            schedule = kernel.plan(lens, self.shape.num_rows)
            found = kernel.bind(self.kernel_table, lens, schedule, self.causal)
            self.calls[capture] = found
        return found


class FlashMLAMetadataBuilder(MLADecodeMetadataBuilder):
    """Uniform causal blocks. Launch shapes depend on num_reqs, Q and H alone.

    Raises:
        BackendRefused: The backend's own reasons, for who builds a builder by hand.
    """

    query_len_support = QueryLenSupport.UNIFORM
    graph_support = GraphSupport.UNIFORM_BATCH
    supports_non_causal_multi_token_decode = False
    supports_non_causal_multi_token_dcp = False

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        validate: Validation = "host",
    ) -> None:
        super().__init__(problem, device, validate=validate)
        self.kernel = self._find_kernel()
        self.is_capturing: Callable[[], object] = torch.cuda.is_current_stream_capturing
        self._current_capture = current_capture
        self.stream_of = stream_getter(self.device_info)
        self.guards_device = (
            self.device.type == "cuda" and torch.cuda.device_count() > 1
        )
        if self.device_info.assumed:
            self.is_capturing = self._current_capture = simulated_capture
        self._shapes: dict[tuple[int, int], BatchShape] = {}
        self._no_pages = self._zeros(torch.int32, problem.max_num_reqs, 1)
        self.min_scale = self.kernel.min_scale
        self.needs_lse = problem.needs_lse
        self.finisher, self.no_finisher = Finisher.of(problem, self.device_info)
        self.checked_caches = CheckedCaches()
        self.find_cache = self.checked_caches.find
        self.q_dtype = torch_dtype(problem.q_dtype, self.device_info)
        self.device_number = -1 if self.device.index is None else self.device.index
        self._guarded: _GuardedEmpties | None = None
        if not self.kernel.serves_empty_rows:
            self._guarded = _GuardedEmpties(problem, self.device)

    def is_elsewhere(self) -> bool:
        """Whether another device is current: the one that the library asks for SMs."""
        return self.guards_device and self.device_number != torch.cuda.current_device()

    def _find_kernel(self) -> DenseDecode:
        reasons = refusals(self.problem, self.device_info)
        kernel = None
        if not reasons:
            try:
                kernel = library_for(self.device_info).decode_for(self.problem.q_dtype)
            except LibraryRefused as refused:
                reasons = [refused.refusal]
        if kernel is None:
            raise BackendRefused(
                "cuda_flashmla cannot serve this problem.", {"cuda_flashmla": reasons}
            )
        return kernel

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> FlashMLAMetadata:
        del query_start_loc_cpu  # blocks are uniform: the shape of q says it all
        num_reqs = seq_lens_device.shape[0]
        shape = self._shape(num_reqs, self._decode_query_len)
        table, lens = self._readable(block_table_tensor), seq_lens_device
        empty = None
        if self._guarded is not None:
            table, lens, empty = self._guarded.fill(table, lens)
        return FlashMLAMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_seq_len=max_seq_len,
            num_reqs=num_reqs,
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            kernel=self.kernel,
            kernel_table=table,
            kernel_lens=lens,
            empty=empty,
            shape=shape,
            finish=(
                None
                if self.finisher is None
                else self.finisher.for_batch(num_reqs, shape.num_rows)
            ),
            current_capture=self._current_capture,
        )

    def _shape(self, num_reqs: int, query_len: int) -> BatchShape:
        found = self._shapes.get((num_reqs, query_len))
        if found is None:
            found = BatchShape.of(num_reqs, query_len, self.problem.num_q_heads)
            self._shapes[num_reqs, query_len] = found
        return found

    def _readable(self, table: Tensor) -> Tensor:
        """A table whose first column exists: the kernel loads it for every request."""
        if table.shape[1] == 0:
            return self._no_pages[: table.shape[0]]
        if table.shape[1] == 1 and table.stride(1) != 1:
            return table.as_strided(table.shape, (table.stride(0), 1))
        return table

    def _zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


class _GuardedEmpties:
    """Copies of lengths and table in which every request has a key, at fixed addresses.

    A request without keys gets one, page 0's first row; what it computes is thrown away.
    """

    def __init__(self, problem: DecodeProblem, device: torch.device) -> None:
        most, width = problem.max_num_reqs, max(problem.table_width, 1)
        self._lens = torch.ones(most, dtype=torch.int32, device=device)
        self._empty = torch.zeros(most, dtype=torch.bool, device=device)
        self._table = torch.zeros((most, width), dtype=torch.int32, device=device)

    def fill(self, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fill the copies for a step, on the device, and return this step's rows."""
        num_reqs = lens.shape[0]
        width = min(table.shape[1], self._table.shape[1])
        safe_lens = self._lens[:num_reqs]
        empty = self._empty[:num_reqs]
        safe_table = self._table[:num_reqs]
        torch.clamp(lens, min=1, out=safe_lens)
        torch.eq(lens, 0, out=empty)
        safe_table[:, :width].copy_(table[:, :width], non_blocking=True)
        safe_table[:, 0].masked_fill_(empty, 0)
        return safe_table, safe_lens, empty.view(num_reqs, 1, 1, 1)
