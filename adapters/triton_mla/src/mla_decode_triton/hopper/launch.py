"""The host side of the Hopper kernel: buffers of one builder, and a step's launches.

A step is `build` (one launch: the work
table) and, for each layer, `forward` (two launches: the kernel and the merge). All grids
depend on the shape of the batch alone, and all buffers keep their addresses, so both can
be captured in a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_decode.errors import ArgumentError
from mla_decode.problem import LATENT_WIDTH
from mla_decode_triton.hopper.asym import asym_kernel
from mla_decode_triton.hopper.grid import Grid, WorkspaceSize, choose_grid
from mla_decode_triton.hopper.merge import merge_kernel
from mla_decode_triton.hopper.schedule import plan_kernel
from mla_decode_triton.hopper.swap import swap_kernel
from mla_decode_triton.hopper.swap_fp8 import swap_fp8_kernel

if TYPE_CHECKING:
    from torch import Tensor

PAGE_SIZES = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
_COPY_BYTES = 16
"""What the copy engine wants addresses and strides to be multiples of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Costs that shape the work table, in tiles of 64 tokens. Estimates so far."""

    piece_overhead: int = 3
    merge_overhead: int = 3
    snap: int = 2
    min_tiles: int = 1
    merge_columns: int = 128
    merges_per_multiprocessor: int = 3
    ahead: bool | None = None
    """Whether scores run a tile ahead; None: where several row tiles share a page."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workspace:
    """The buffers that steps write beside their outputs; their addresses never change."""

    schedule: Tensor
    """int32, the work table: see `schedule.plan_kernel`."""
    scratch: Tensor
    """int32."""
    partial_out: Tensor
    """float32 [rows, 512]."""
    partial_lse: Tensor
    """float32 [rows]."""

    @classmethod
    def allocate(cls, size: WorkspaceSize, device: torch.device) -> Workspace:
        """Allocate all of it."""

        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = size.partial_rows
        return cls(
            schedule=make(size.schedule_entries, dtype=torch.int32),
            scratch=make(size.scratch_entries, dtype=torch.int32),
            partial_out=make(rows, LATENT_WIDTH, dtype=torch.float32),
            partial_lse=make(rows, dtype=torch.float32),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class HopperStep:
    """The launches of one block length, on buffers that others may share."""

    max_num_reqs: int
    query_len: int
    num_heads: int
    multiprocessors: int
    workspace: Workspace
    tuning: Tuning = field(default_factory=Tuning)
    grid: Grid = field(init=False)

    @classmethod
    def alone(
        cls,
        *,
        max_num_reqs: int,
        query_len: int,
        num_heads: int,
        device: torch.device,
        multiprocessors: int,
        tuning: Tuning | None = None,
    ) -> HopperStep:
        """A step with a workspace of its own."""
        size = WorkspaceSize.of([query_len * num_heads], max_num_reqs, multiprocessors)
        return cls(
            max_num_reqs=max_num_reqs,
            query_len=query_len,
            num_heads=num_heads,
            multiprocessors=multiprocessors,
            workspace=Workspace.allocate(size, device),
            tuning=tuning or Tuning(),
        )

    def __post_init__(self) -> None:
        """Lay the rows over the device."""
        self.grid = choose_grid(self.num_rows, self.multiprocessors)

    @property
    def num_rows(self) -> int:
        """Rows (token, head) of a request."""
        return self.query_len * self.num_heads

    def build(self, seq_lens: Tensor) -> None:
        """Write the work table of a step: one launch, nothing read on the host.

        Args:
            seq_lens: int32 [num_reqs] on the device; 0 for requests without keys.
        """
        num_reqs = seq_lens.shape[0]
        steps = self.max_num_reqs.bit_length()
        plan_kernel[(1,)](
            seq_lens,
            self.workspace.schedule,
            self.workspace.scratch,
            num_reqs,
            self.grid.parts,
            OVERHEAD=self.tuning.piece_overhead,
            MERGE=self.tuning.merge_overhead,
            SNAP=self.tuning.snap,
            MIN_TILES=self.tuning.min_tiles,
            BLOCK_REQS=1 << steps,
            BLOCK_PARTS=self.grid.block_parts,
            STEPS=steps,
            num_warps=8,
        )

    def forward(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor | None,
        *,
        softmax_scale: float,
        causal: bool,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Fill `out` and `lse` of one layer; `build` has been called for these lengths.

        Args:
            q_latent: [num_reqs * Q, H, 512] bf16 or fp16; rows at one common stride.
            q_rope: [num_reqs * Q, H, 64], the same dtype.
            cache: [pages, page_size, 576], the same dtype, or fp8 (e4m3, also as uint8)
                where Q * H <= 32; rows contiguous, the page stride a multiple of 16 bytes.
            table: int32 [num_reqs, width].
            seq_lens: int32 [num_reqs].
            out: [num_reqs * Q, H, 512] contiguous, the same dtype.
            lse: float32 [num_reqs * Q, H] contiguous, or None.
            softmax_scale: Multiplies q.k.
            causal: Tail-aligned causal, or every key for every token.
            kv_scale: float32 [1] on the device: what an fp8 cache is to be multiplied by.
        """
        num_reqs = seq_lens.shape[0]
        grid = self.grid
        page_size = cache.shape[1]
        q_box = [1, grid.rows, 64]
        if cache.dtype == torch.uint8:
            cache = cache.view(FP8)
        self._require_served(cache, kv_scale)
        constants: dict[str, Any] = {"ROWS": grid.rows}
        kernel = swap_kernel
        if cache.dtype == FP8:
            kernel = swap_fp8_kernel
            constants["kv_scale"] = kv_scale
        elif not grid.swapped:
            kernel = asym_kernel
            ahead = self.tuning.ahead
            constants = {"AHEAD": grid.row_tiles > 1 if ahead is None else ahead}
        kernel[grid.row_tiles, grid.parts](
            self._queries(q_latent, num_reqs, q_box),
            self._queries(q_rope, num_reqs, q_box),
            _describe_cache(cache),
            table,
            seq_lens,
            self.workspace.schedule,
            out,
            self.workspace.partial_lse if lse is None else lse,
            self.workspace.partial_out,
            self.workspace.partial_lse,
            scale_log2=softmax_scale * math.log2(math.e),
            num_heads=self.num_heads,
            query_len=self.query_len,
            table_stride=table.stride(0),
            num_pages=cache.shape[0],
            num_reqs=num_reqs,
            num_parts=grid.parts,
            CAUSAL=causal and self.query_len > 1,
            NEEDS_LSE=lse is not None,
            PAGE=page_size,
            num_warps=4,
            **constants,
        )
        pieces = max(4, min(64, 2 * grid.parts // max(num_reqs, 1)))
        merge_kernel[(self.tuning.merges_per_multiprocessor * self.multiprocessors,)](
            self.workspace.partial_out,
            self.workspace.partial_lse,
            out,
            self.workspace.partial_lse if lse is None else lse,
            self.workspace.schedule,
            self.num_rows,
            NEEDS_LSE=lse is not None,
            BLOCK_PARTS=self.grid.block_parts,
            BLOCK_PIECES=1 << (pieces - 1).bit_length(),
            BLOCK_COLUMNS=self.tuning.merge_columns,
            EARLY=True,
            num_warps=4,
            launch_pdl=True,
        )

    def _queries(self, q: Tensor, num_reqs: int, box: list[int]) -> TensorDescriptor:
        """Describe queries as [requests, rows, width]: rows past the last are zeros."""
        token, head, _ = q.stride()
        if not is_regular(q, self):
            raise ArgumentError(
                "The Hopper kernel reads the rows of a query at one common stride.",
                got=f"strides {q.stride()} at address {q.data_ptr():#x}",
                allowed="contiguous rows, token stride = H * head stride, all of them "
                "multiples of 16 bytes",
                fix="join the query into a contiguous buffer first",
            )
        layout = gl.NVMMASharedLayout(128, 16, 3)
        shape = [num_reqs, self.num_rows, q.shape[2]]
        strides = [token * self.query_len, head, 1]
        return TensorDescriptor(q, shape, strides, box, layout)

    def _require_served(self, cache: Tensor, kv_scale: Tensor | None) -> None:
        """Refuse a cache that no variant reads."""
        is_fp8 = cache.dtype == FP8
        served = cache.dtype in DTYPES or (is_fp8 and self.grid.swapped)
        if cache.shape[1] in PAGE_SIZES and served and is_fp8 == (kv_scale is not None):
            return
        raise ArgumentError(
            "The Hopper kernel does not serve this cache.",
            got=f"pages of {cache.shape[1]}, {cache.dtype}, {self.num_rows} rows, "
            f"kv_scale {'given' if kv_scale is not None else 'not given'}",
            allowed=f"pages of {PAGE_SIZES}; {DTYPES} without a scale, {FP8} with one "
            "for up to 32 rows",
            fix="use the portable kernel",
        )


def is_regular(q: Tensor, step: HopperStep) -> bool:
    """Whether the copy engine can read queries as [requests, Q * H, width]."""
    token, head, column = q.stride()
    bits = q.data_ptr() | token * q.itemsize | head * q.itemsize
    spaced = token == head * step.num_heads or step.query_len == 1
    return column == 1 and spaced and not bits % _COPY_BYTES


def _describe_cache(cache: Tensor) -> TensorDescriptor:
    """Describe a cache in boxes of a page's rows by 64 columns; made anew each call.

    Keeping descriptors would keep the engine's caches alive.
    """
    bits = cache.dtype.itemsize * 8
    return TensorDescriptor(
        cache,
        list(cache.shape),
        list(cache.stride()),
        [1, min(cache.shape[1], 64), 64],
        gl.NVMMASharedLayout(bits * 8, bits, 3),
    )
