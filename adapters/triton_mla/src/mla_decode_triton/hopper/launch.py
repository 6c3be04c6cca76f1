"""The host side of the Hopper kernel: buffers of one builder, and a step's launches.

A step is `build` (one launch: the work
table) and, for each layer, `forward` (two launches: the kernel and the merge). All grids
depend on the shape of the batch alone, and all buffers keep their addresses, so both can
be captured in a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mla_decode.errors import ArgumentError
from mla_decode.problem import LATENT_WIDTH
from mla_decode_triton.hopper.asym import asym_kernel
from mla_decode_triton.hopper.boxes import box_cache, box_queries
from mla_decode_triton.hopper.direct import Variants
from mla_decode_triton.hopper.grid import (
    Grid,
    MergeShape,
    WorkspaceSize,
    choose_grid,
    choose_merge,
)
from mla_decode_triton.hopper.merge import merge_kernel
from mla_decode_triton.hopper.schedule import plan_kernel
from mla_decode_triton.hopper.swap import swap_kernel
from mla_decode_triton.hopper.swap_fp8 import swap_fp8_kernel

if TYPE_CHECKING:
    from torch import Tensor

PAGE_SIZES = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Costs that shape the work table, in tiles of 64 tokens."""

    piece_overhead: int | None = None
    """Of an item: its queries, its outputs, the pipeline's start; None: by its rows."""
    merge_overhead: int = 1
    """Of a merge that has anything to do."""
    merged_piece: int | None = None
    """Of writing and reading a piece: two floats a value; None: by its rows."""
    snap: int = 2
    min_tiles: int = 1
    merges_per_multiprocessor: int = 16
    """Programs of the merge, at most: what fits beside each other."""
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
    variants: Variants = field(init=False, default_factory=Variants)

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
        self.variants.launch(
            plan_kernel,
            (1, 1, 1),
            (),
            (seq_lens, self.workspace.schedule, self.workspace.scratch),
            (num_reqs, self.grid.parts),
            {
                "OVERHEAD": _given(
                    self.tuning.piece_overhead, -(-self.grid.rows // 24)
                ),
                "MERGE": self.tuning.merge_overhead,
                "PIECE": _given(self.tuning.merged_piece, self.grid.rows // 16),
                "SNAP": self.tuning.snap,
                "MIN_TILES": self.tuning.min_tiles,
                "BLOCK_REQS": 1 << steps,
                "BLOCK_PARTS": self.grid.block_parts,
                "STEPS": steps,
            },
            num_warps=8,
        )

    def forward(
        self,
        q_latent: Tensor,
        q_rope: Tensor | None,
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
            q_rope: [num_reqs * Q, H, 64], the same dtype. None: `q_latent` is
                [num_reqs * Q, H, 576] and holds both.
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
        grid, workspace = self.grid, self.workspace
        if cache.dtype == torch.uint8:
            cache = cache.view(FP8)
        self._require_served(cache, kv_scale)
        tensors: tuple[Tensor, ...] = (
            table,
            seq_lens,
            workspace.schedule,
            out,
            workspace.partial_lse if lse is None else lse,
            workspace.partial_out,
            workspace.partial_lse,
        )
        constants = {
            "CAUSAL": causal and self.query_len > 1,
            "NEEDS_LSE": lse is not None,
            "PAGE": cache.shape[1],
        }
        kernel = swap_kernel
        if kv_scale is not None:
            kernel = swap_fp8_kernel
            tensors = *tensors, kv_scale
        elif not grid.swapped:
            kernel = asym_kernel
        if grid.swapped:
            constants["ROWS"] = grid.rows
        else:
            ahead = self.tuning.ahead
            constants["AHEAD"] = grid.row_tiles > 1 if ahead is None else ahead
        queries = box_queries(
            q_latent, q_rope, query_len=self.query_len, rows=grid.rows
        )
        self.variants.launch(
            kernel,
            (grid.row_tiles, grid.parts, 1),
            (*queries, box_cache(cache)),
            tensors,
            (
                softmax_scale * _LOG2E,
                self.num_heads,
                self.query_len,
                table.stride(0),
                cache.shape[0],
                num_reqs,
                grid.parts,
            ),
            constants,
            num_warps=4,
        )
        self.merge(out, lse, choose_merge(grid.parts, num_reqs), num_reqs)

    def merge(
        self, out: Tensor, lse: Tensor | None, shape: MergeShape, num_reqs: int
    ) -> None:
        """Merge the pieces of the requests that the work table cut."""
        units = min(num_reqs, self.grid.parts) * self.num_rows * shape.blocks
        most = self.tuning.merges_per_multiprocessor * self.multiprocessors
        workspace = self.workspace
        self.variants.launch(
            merge_kernel,
            (min(units, most), 1, 1),
            (),
            (
                workspace.partial_out,
                workspace.partial_lse,
                out,
                workspace.partial_lse if lse is None else lse,
                workspace.schedule,
            ),
            (self.num_rows,),
            {
                "NEEDS_LSE": lse is not None,
                "BLOCK_PARTS": self.grid.block_parts,
                "BLOCK_PIECES": shape.pieces,
                "BLOCK_COLUMNS": shape.columns,
                "EARLY": True,
            },
            num_warps=4,
            launch_pdl=True,
        )

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


def _given(value: int | None, default: int) -> int:
    return default if value is None else value
