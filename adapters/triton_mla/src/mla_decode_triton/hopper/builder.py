"""The builder over the Hopper kernel: a work table a step, written on the device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from mla_decode.batch import QueryLenSupport
from mla_decode.builder import GraphSupport, MLADecodeMetadataBuilder
from mla_decode.dtypes import torch_dtype
from mla_decode.errors import BackendRefused
from mla_decode.mask import Mask
from mla_decode.metadata import DecodeMetadata, StepFacts
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode_triton.hopper.backend import (
    kernels_of,
    rows_in_use,
    uninterpretable,
    workspace_size,
)
from mla_decode_triton.hopper.boxes import box_queries
from mla_decode_triton.hopper.capability import hopper_refusals
from mla_decode_triton.hopper.grid import (
    MERGE_SHAPES,
    choose_merge,
    choose_rows,
    count_multiprocessors,
)
from mla_decode_triton.hopper.launch import HopperStep
from mla_decode_triton.hopper.workspace import Workspace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from mla_decode.builder import Validation
    from mla_decode.device import DeviceInfo
    from mla_decode.forward_check import CheckedCall
    from mla_decode.problem import DecodeProblem
    from mla_decode_triton.hopper.grid import MergeShape
    from mla_decode_triton.hopper.known import Known

_HERE = nullcontext()


@dataclass(slots=True, kw_only=True, eq=False)
class HopperMetadata(DecodeMetadata):
    """One step's batch and the launches that serve it."""

    step: HopperStep
    merge_shape: MergeShape
    known: Known | None = field(default=None, init=False)
    """The launches of layers of the geometry that core compared last."""
    known_key: tuple[object, bool, int, MergeShape | None] = field(
        default=(None, True, 0, None), init=False
    )
    """All that they depend on and that is not an address, that geometry first."""
    reads: tuple[int, int] = field(default=(0, 0), init=False)
    """Addresses of the table and of the lengths."""

    def find_known(self) -> Known | None:
        """Look the launches up, once a step and geometry where they are known."""
        if self.known is None or self.known_key[0] is not self.geometry:
            table = self.block_table
            self.known_key = (
                *(self.geometry, self.causal),
                *(table.stride(0), self.merge_shape),
            )
            self.reads = table.data_ptr(), self.seq_lens.data_ptr()
            self.known = self.step.known.get(self.known_key)
        return self.known

    def facts(self) -> StepFacts:
        """The launches of one forward."""
        problem = cast("HopperMetadataBuilder", self.builder).problem
        return StepFacts(
            kernels=kernels_of(problem, self.step.grid.rows),
            path="Hopper kernel",
            num_q_heads=problem.num_q_heads,
            query_len=self.query_len,
        )


class HopperMetadataBuilder(MLADecodeMetadataBuilder):
    """Uniform blocks under either mask. A build launches one kernel and waits for none.

    Kernels are compiled here and not while serving, for every mask and block length
    that the problem names. A batch of few keys has programs of fewer rows than others;
    how many is told by its size and its longest request, or under graphs, whose steps
    may be replayed at any length, by the longest that there can be.

    Raises:
        BackendRefused: The kernel's reasons, for who builds a builder by hand.
        ArgumentError: A build where there is no GPU.
    """

    query_len_support = QueryLenSupport.UNIFORM
    graph_support = GraphSupport.UNIFORM_BATCH
    supports_non_causal_multi_token_decode = True
    supports_non_causal_multi_token_dcp = True

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        validate: Validation = "host",
    ) -> None:
        super().__init__(problem, device, validate=validate)
        reasons = hopper_refusals(problem, self.device_info)
        if reasons:
            raise BackendRefused(
                "The Hopper kernel of triton_mla cannot serve this problem.",
                {"triton_mla": reasons},
            )
        size = workspace_size(problem, self.device_info)
        workspace = Workspace.allocate(size, self.device)
        self.multiprocessors = count_multiprocessors(self.device_info)
        self.steps = {
            (query_len, rows): HopperStep(
                max_num_reqs=problem.max_num_reqs,
                query_len=query_len,
                num_heads=problem.num_q_heads,
                multiprocessors=self.multiprocessors,
                workspace=workspace,
                rows=rows,
            )
            for query_len in problem.query_lens
            for rows in rows_in_use(problem, query_len, self.device_info)
        }
        has_gpu = self.device.type == "cuda"
        self.has_only_gpu = has_gpu and torch.cuda.device_count() < 2
        if has_gpu:
            with torch.cuda.device(self.device):
                self._compile()

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> HopperMetadata:
        del query_start_loc_cpu  # blocks are uniform: num_reqs and Q say it all
        query_len, num_reqs = self._decode_query_len, seq_lens_device.shape[0]
        num_rows = query_len * self.problem.num_q_heads
        rows = choose_rows(
            num_rows, max(num_reqs, 1), max_seq_len, self.multiprocessors
        )
        step = self.steps[query_len, rows]
        if self.has_only_gpu:
            step.build(seq_lens_device)
        else:
            with on_device(self):
                step.build(seq_lens_device)
        return HopperMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_seq_len=max_seq_len,
            num_reqs=num_reqs,
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            step=step,
            merge_shape=choose_merge(step.grid.parts, num_reqs, max_seq_len),
        )

    def _compile(self) -> None:
        """Serve one request without keys by each variant: it loads nothing."""
        problem = self.problem
        q_dtype = torch_dtype(problem.q_dtype, self.device_info)
        kv_dtype = torch_dtype(problem.kv_dtype, self.device_info)
        pages = self._empty(problem.page_stride, dtype=kv_dtype)
        page = pages[: problem.page_size * ROW_WIDTH].view(1, -1, ROW_WIDTH)
        table = self._empty(1, problem.table_width, dtype=torch.int32)
        lens = self._empty(1, dtype=torch.int32).zero_()
        scale = self._empty(1) if problem.kv_dtype == "fp8" else None
        for query_len, mask in problem.blocks():
            block = query_len, problem.num_q_heads
            q = self._empty(*block, ROW_WIDTH, dtype=q_dtype)
            out = self._empty(*block, LATENT_WIDTH, dtype=self.out_dtype)
            lse = self._empty(*block) if problem.needs_lse else None
            for (served_len, _), step in self.steps.items():
                if served_len != query_len:
                    continue
                step.build(lens)
                step.forward(
                    q,
                    None,
                    page,
                    table,
                    lens,
                    out,
                    lse,
                    softmax_scale=1.0,
                    causal=mask is Mask.CAUSAL,
                    kv_scale=scale,
                )
                for shape in MERGE_SHAPES:
                    step.merge(out, lse, shape, num_reqs=1)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def on_device(builder: HopperMetadataBuilder) -> AbstractContextManager[object]:
    """Launches go to the builder's GPU.

    Raises:
        ArgumentError: It has none.
    """
    if builder.device.type != "cuda":
        raise uninterpretable(builder.device_info)
    if torch.cuda.current_device() == builder.device.index:
        return _HERE
    return torch.cuda.device(builder.device)


def decode(call: CheckedCall) -> None:
    """Fill the outputs of a checked call, every row."""
    metadata = cast("HopperMetadata", call.metadata)
    builder = cast("HopperMetadataBuilder", metadata.builder)
    if builder.has_only_gpu:
        _decode(call, metadata, builder)
    else:
        with on_device(builder):
            _decode(call, metadata, builder)


def _decode(
    call: CheckedCall, metadata: HopperMetadata, builder: HopperMetadataBuilder
) -> None:
    known = metadata.find_known()
    if known is not None and known.launch(call, metadata.reads):
        return
    step = metadata.step
    latent, rope = call.q, call.q_rope
    boxed = queries = step.boxes.queries(latent, rope)
    if queries is None:
        if rope is None:
            latent, rope = latent[..., :LATENT_WIDTH], latent[..., LATENT_WIDTH:]
        joined = builder.join_query(latent, rope)
        queries = box_queries(joined, None, step.query_len, step.grid.rows)
    launched = step.attend(
        queries,
        call.kv_cache,
        metadata.block_table,
        metadata.seq_lens,
        call.out,
        call.lse,
        call.softmax_scale,
        metadata.causal,
        call.kv_scale,
        metadata.merge_shape,
    )
    if boxed is not None:
        metadata.known = step.learn(metadata.known_key, call, launched)
