"""What a step launches: which kernels, with which constants, on which grids.

All of it depends on the shape of the batch and on the tensors' types, never on lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mla_decode.errors import ArgumentError
from mla_decode_triton.hopper.asym import asym_kernel
from mla_decode_triton.hopper.asym_fp8 import asym_fp8_kernel
from mla_decode_triton.hopper.direct import Variant
from mla_decode_triton.hopper.known import Layer
from mla_decode_triton.hopper.merge import merge_kernel
from mla_decode_triton.hopper.merge_rows import merge_kernel as merge_rows_kernel
from mla_decode_triton.hopper.schedule import plan_kernel
from mla_decode_triton.hopper.swap import swap_kernel
from mla_decode_triton.hopper.swap_fp8 import swap_fp8_kernel

if TYPE_CHECKING:
    from collections.abc import Hashable

    from mla_decode_triton.hopper.boxes import BoxForm
    from mla_decode_triton.hopper.grid import Grid, MergeShape

PAGE_SIZES = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
MERGE_REGISTERS = 64
"""Of a thread that merges rows by warps: 8 programs a multiprocessor."""


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
    prefetch: int = 2
    """Tiles that more than 32 rows ask of an fp8 cache ahead of time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Variants:
    """The variants of one block length, each made once; the first launch compiles it."""

    grid: Grid
    query_len: int
    num_rows: int
    """Rows (token, head) of a request."""
    max_num_reqs: int
    multiprocessors: int
    tuning: Tuning
    _made: dict[Hashable, Variant] = field(init=False, default_factory=dict)
    """By what they and their constants are chosen by, and by types."""

    def plan(self) -> Variant:
        """The kernel that writes the work table."""
        variant = self._made.get("plan")
        if variant is None:
            variant = self._made["plan"] = self._new_plan()
        return variant

    def layer(
        self,
        types: tuple[BoxForm, torch.dtype, torch.dtype, bool, bool],
        page_size: int,
        *,
        causal: bool,
        num_reqs: int,
        shape: MergeShape,
    ) -> Layer:
        """Choose the launches of a layer; batch sizes share variants.

        Args:
            types: The query's form, the dtypes of cache and output, whether there is no
                scale, and whether no LSE is asked for.
            page_size: Of the cache.
            causal: Tail-aligned causal, or every key for every token.
            num_reqs: Of the batch.
            shape: Of its merge.

        Raises:
            ArgumentError: No variant reads such a cache.
        """
        _, kv_dtype, out_dtype, is_unscaled, has_no_lse = types
        grid = self.grid
        key = types, page_size, causal
        variant = self._made.get(key)
        if variant is None:
            _require_served(kv_dtype, page_size, is_fp8=not is_unscaled)
            variant = self._made[key] = self._new_attention(
                is_fp8=not is_unscaled,
                page_size=page_size,
                needs_lse=not has_no_lse,
                causal=causal,
            )
        return Layer(
            grid=(grid.row_tiles, grid.parts, 1),
            attention=variant,
            is_boxed=is_unscaled or grid.swapped,
            merge_grid=self.merge_grid(shape, num_reqs),
            merge=self.merge(shape, out_dtype, needs_lse=not has_no_lse),
        )

    def merge(
        self, shape: MergeShape, out_dtype: torch.dtype, *, needs_lse: bool
    ) -> Variant:
        """The kernel that merges pieces, of one shape."""
        key = shape, out_dtype, needs_lse
        variant = self._made.get(key)
        if variant is None:
            variant = self._made[key] = self._new_merge(shape, needs_lse=needs_lse)
        return variant

    def merge_grid(self, shape: MergeShape, num_reqs: int) -> tuple[int, int, int]:
        """Programs that merge a batch's pieces."""
        rows = -(-self.num_rows // shape.rows)
        units = min(num_reqs, self.grid.parts) * rows * shape.blocks
        most = shape.programs * self.multiprocessors or units
        return min(units, most), 1, 1

    def _new_plan(self) -> Variant:
        tuning, grid = self.tuning, self.grid
        steps = self.max_num_reqs.bit_length()
        constants = {
            "OVERHEAD": _given(tuning.piece_overhead, -(-grid.rows // 24)),
            "MERGE": tuning.merge_overhead,
            "PIECE": _given(tuning.merged_piece, grid.rows // 16),
            "SNAP": tuning.snap,
            "MIN_TILES": tuning.min_tiles,
            "BLOCK_REQS": 1 << steps,
            "BLOCK_PARTS": grid.block_parts,
            "STEPS": steps,
        }
        return Variant(
            kernel=plan_kernel, constants=constants, options={"num_warps": 8}
        )

    def _new_attention(
        self, *, is_fp8: bool, page_size: int, needs_lse: bool, causal: bool
    ) -> Variant:
        grid = self.grid
        constants = {
            "CAUSAL": causal and self.query_len > 1,
            "NEEDS_LSE": needs_lse,
            "PAGE": page_size,
        }
        if grid.swapped:
            kernel = swap_fp8_kernel if is_fp8 else swap_kernel
            constants["ROWS"] = grid.rows
        else:
            kernel = asym_fp8_kernel if is_fp8 else asym_kernel
            if is_fp8:
                constants["PREFETCH"] = self.tuning.prefetch
        return Variant(kernel=kernel, constants=constants, options={"num_warps": 4})

    def _new_merge(self, shape: MergeShape, *, needs_lse: bool) -> Variant:
        constants = {
            "NEEDS_LSE": needs_lse,
            "BLOCK_PARTS": self.grid.block_parts,
            "BLOCK_PIECES": shape.pieces,
            "BLOCK_COLUMNS": shape.columns,
        }
        options = {"num_warps": 4, "launch_pdl": True}
        if shape.rows == 1:
            constants["EARLY"] = True
            return Variant(kernel=merge_kernel, constants=constants, options=options)
        constants |= {"BLOCK_ROWS": shape.rows, "LOOPS": shape.programs > 0}
        return Variant(
            kernel=merge_rows_kernel,
            constants=constants,
            options=options | {"maxnreg": MERGE_REGISTERS},
        )


def _require_served(kv_dtype: torch.dtype, page_size: int, *, is_fp8: bool) -> None:
    """Refuse a cache that no variant reads."""
    served = kv_dtype == FP8 if is_fp8 else kv_dtype in DTYPES
    if page_size in PAGE_SIZES and served:
        return
    raise ArgumentError(
        "The Hopper kernel does not serve this cache.",
        got=f"pages of {page_size}, {kv_dtype}, "
        f"kv_scale {'given' if is_fp8 else 'not given'}",
        allowed=f"pages of {PAGE_SIZES}; {DTYPES} without a scale, {FP8} with one",
        fix="use the portable kernel",
    )


def _given(value: int | None, default: int) -> int:
    return default if value is None else value
