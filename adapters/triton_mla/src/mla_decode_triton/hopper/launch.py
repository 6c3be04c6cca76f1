"""The host side of the Hopper kernel: the launches of a step, and what they choose by.

A step is `build` (one launch: the work table) and, for each layer, `forward` (two
launches: the kernel and the merge). All grids depend on the shape of the batch alone, and
all buffers keep their addresses, so both can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mla_decode.errors import ArgumentError
from mla_decode_triton.hopper.asym import asym_kernel
from mla_decode_triton.hopper.asym_fp8 import asym_fp8_kernel
from mla_decode_triton.hopper.boxes import (
    HeldBoxes,
    box_queries,
    hold,
    page_stride,
)
from mla_decode_triton.hopper.compat import hooks_are_set
from mla_decode_triton.hopper.direct import Variant
from mla_decode_triton.hopper.grid import (
    Grid,
    MergeShape,
    WorkspaceSize,
    choose_grid,
    choose_merge,
)
from mla_decode_triton.hopper.known import LOG2E, Known, Launched, Layer
from mla_decode_triton.hopper.merge import merge_kernel
from mla_decode_triton.hopper.merge_rows import merge_kernel as merge_rows_kernel
from mla_decode_triton.hopper.schedule import plan_kernel
from mla_decode_triton.hopper.swap import swap_kernel
from mla_decode_triton.hopper.swap_fp8 import swap_fp8_kernel
from mla_decode_triton.hopper.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from mla_decode.forward_check import CheckedCall
    from mla_decode_triton.hopper.boxes import Boxed, BoxForm
    from mla_decode_triton.hopper.direct import Directly

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
class HopperStep:
    """The launches of one block length, on buffers that others may share.

    `rows` are the query rows of a program, by `choose_rows`; None: `rows_of_program`.
    """

    max_num_reqs: int
    query_len: int
    num_heads: int
    multiprocessors: int
    workspace: Workspace
    rows: int | None = None
    tuning: Tuning = field(default_factory=Tuning)
    grid: Grid = field(init=False)
    num_rows: int = field(init=False)
    """Rows (token, head) of a request."""
    variants: dict[Hashable, Variant] = field(init=False, default_factory=dict)
    """Kernels by what they and their constants are chosen by, and by types."""
    layers: dict[Hashable, Layer] = field(init=False, default_factory=dict)
    """The same of layers: as many as batch sizes, at most."""
    known: dict[Hashable, Known] = field(init=False, default_factory=dict)
    """Layers that were launched directly, by all of them that is not an address."""
    plan: Directly | None = field(init=False, default=None)
    """The launch of `build`, once it was launched another way."""
    boxes: HeldBoxes = field(init=False)
    addresses: tuple[int, int, int, int] = field(init=False)
    """Of the workspace: `schedule`, `scratch`, `partial_out`, `partial_lse`."""

    @classmethod
    def alone(
        cls,
        *,
        max_num_reqs: int,
        query_len: int,
        num_heads: int,
        device: torch.device,
        multiprocessors: int,
        rows: int | None = None,
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
            rows=rows,
            tuning=tuning or Tuning(),
        )

    def __post_init__(self) -> None:
        """Lay the rows over the device."""
        self.num_rows = self.query_len * self.num_heads
        self.grid = choose_grid(self.num_rows, self.multiprocessors, self.rows)
        self.boxes = HeldBoxes(self.query_len, self.grid.rows)
        work = self.workspace
        self.addresses = (
            *(work.schedule.data_ptr(), work.scratch.data_ptr()),
            *(work.partial_out.data_ptr(), work.partial_lse.data_ptr()),
        )

    def build(self, seq_lens: Tensor) -> None:
        """Write the work table of a step: one launch, nothing read on the host.

        Args:
            seq_lens: int32 [num_reqs] on the device; 0 for requests without keys.
        """
        plan, workspace = self.plan, self.workspace
        addresses = seq_lens.data_ptr(), *self.addresses[:2]
        numbers = seq_lens.shape[0], self.grid.parts
        if plan is not None and not hooks_are_set():
            plan.launch((1, 1, 1), (*addresses, *numbers, *plan.values))
            return
        variant = self.variants.get("plan")
        if variant is None:
            variant = self.variants["plan"] = self._plan_variant()
        tensors = seq_lens, workspace.schedule, workspace.scratch
        variant.launch((1, 1, 1), (), tensors, addresses, numbers)
        self.plan = variant.directly("seq_lens")

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
            cache: [pages, page_size, 576], the same dtype, or fp8 (e4m3, also as uint8);
                rows contiguous, address and page stride multiples of 16 bytes.
            table: int32 [num_reqs, width].
            seq_lens: int32 [num_reqs].
            out: [num_reqs * Q, H, 512] contiguous, the same dtype.
            lse: float32 [num_reqs * Q, H] contiguous, or None.
            softmax_scale: Multiplies q.k.
            causal: Tail-aligned causal, or every key for every token.
            kv_scale: float32 [1] on the device: what an fp8 cache is to be multiplied by.
        """
        if cache.dtype is torch.uint8:
            cache = cache.view(FP8)
        queries = self.boxes.queries(q_latent, q_rope)
        if queries is None:
            queries = box_queries(q_latent, q_rope, self.query_len, self.grid.rows)
        self.attend(
            *(queries, cache, table, seq_lens, out, lse),
            *(softmax_scale, causal, kv_scale),
        )

    def attend(  # by position: once a layer
        self,
        queries: tuple[Boxed, Boxed],
        cache: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor | None,
        softmax_scale: float,
        causal: bool,
        kv_scale: Tensor | None,
    ) -> Launched:
        """Do as `forward` does, with queries that are boxed; fp8 is never uint8 here."""
        num_reqs, page_size = seq_lens.shape[0], cache.shape[1]
        types = queries[0].form, cache.dtype, out.dtype, kv_scale is None, lse is None
        key = types, page_size, causal, num_reqs
        layer = self.layers.get(key)
        if layer is None:
            self._require_served(cache, kv_scale)
            layer = self.layers[key] = self._choose_layer(
                types, page_size, causal=causal, num_reqs=num_reqs
            )
        workspace, (schedule_at, _, pieces_at, sums_at) = self.workspace, self.addresses
        out_at = out.data_ptr()
        sums, lse_at = (
            (workspace.partial_lse, sums_at) if lse is None else (lse, lse.data_ptr())
        )
        tensors: tuple[Tensor, ...] = (
            *(table, seq_lens, workspace.schedule, out, sums),
            *(workspace.partial_out, workspace.partial_lse),
        )
        addresses: tuple[int, ...] = (
            *(table.data_ptr(), seq_lens.data_ptr(), schedule_at, out_at, lse_at),
            *(pieces_at, sums_at),
        )
        if kv_scale is not None:
            tensors = *tensors, kv_scale
            addresses = *addresses, kv_scale.data_ptr()
        boxes: tuple[Boxed, ...] = queries
        if layer.is_boxed:
            boxes, pages = (*queries, self.boxes.cache(cache)), cache.shape[0]
        else:
            pages = page_stride(cache)
            tensors, addresses = (cache, *tensors), (cache.data_ptr(), *addresses)
        numbers = (
            *(self.num_heads, self.query_len, table.stride(0), pages),
            *(num_reqs, self.grid.parts),
        )
        layer.attention.launch(
            layer.grid,
            boxes,
            tensors,
            addresses,
            (softmax_scale * LOG2E, *numbers),
        )
        layer.merge.launch(
            layer.merge_grid,
            (),
            (
                workspace.partial_out,
                workspace.partial_lse,
                out,
                sums,
                workspace.schedule,
            ),
            (pieces_at, sums_at, out_at, lse_at, schedule_at),
            (self.num_rows,),
        )
        return Launched(layer, boxes, numbers)

    def learn(
        self, key: Hashable, call: CheckedCall, launched: Launched
    ) -> Known | None:
        """Let layers like one that was launched be `known`, where that can be.

        Args:
            key: All that `launched` depends on and that is not an address.
            call: Whose queries were boxed as they are.
            launched: As `attend` gave it.
        """
        known = self.known.get(key)
        if known is None:
            known = Known.of(launched, self.addresses, self.num_rows)
            if known is None:
                return None
            hold(self.known, key, known)
        known.hold(call, launched.boxes)
        return known

    def merge(
        self, out: Tensor, lse: Tensor | None, shape: MergeShape, num_reqs: int
    ) -> None:
        """Merge the pieces of the requests that the work table cut."""
        variant = self._merge_variant(shape, out.dtype, needs_lse=lse is not None)
        workspace = self.workspace
        tensors = (
            *(workspace.partial_out, workspace.partial_lse, out),
            *(workspace.partial_lse if lse is None else lse, workspace.schedule),
        )
        addresses = [tensor.data_ptr() for tensor in tensors]
        grid = self._merge_grid(shape, num_reqs)
        variant.launch(grid, (), tensors, addresses, (self.num_rows,))

    def _choose_layer(
        self,
        types: tuple[BoxForm, torch.dtype, torch.dtype, bool, bool],
        page_size: int,
        *,
        causal: bool,
        num_reqs: int,
    ) -> Layer:
        """Choose the launches; variants are shared among batch sizes."""
        _, _, out_dtype, is_unscaled, has_no_lse = types
        grid = self.grid
        key = types, page_size, causal
        variant = self.variants.get(key)
        if variant is None:
            variant = self.variants[key] = self._attention_variant(
                is_fp8=not is_unscaled,
                page_size=page_size,
                needs_lse=not has_no_lse,
                causal=causal,
            )
        shape = choose_merge(grid.parts, num_reqs)
        return Layer(
            grid=(grid.row_tiles, grid.parts, 1),
            attention=variant,
            is_boxed=is_unscaled or grid.swapped,
            merge_grid=self._merge_grid(shape, num_reqs),
            merge=self._merge_variant(shape, out_dtype, needs_lse=not has_no_lse),
        )

    def _merge_grid(self, shape: MergeShape, num_reqs: int) -> tuple[int, int, int]:
        rows = -(-self.num_rows // shape.rows)
        units = min(num_reqs, self.grid.parts) * rows * shape.blocks
        most = shape.programs * self.multiprocessors or units
        return min(units, most), 1, 1

    def _plan_variant(self) -> Variant:
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

    def _attention_variant(
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

    def _merge_variant(
        self, shape: MergeShape, out_dtype: torch.dtype, *, needs_lse: bool
    ) -> Variant:
        key = shape, out_dtype, needs_lse
        variant = self.variants.get(key)
        if variant is None:
            variant = self.variants[key] = self._new_merge(shape, needs_lse=needs_lse)
        return variant

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

    def _require_served(self, cache: Tensor, kv_scale: Tensor | None) -> None:
        """Refuse a cache that no variant reads."""
        is_fp8 = kv_scale is not None
        served = cache.dtype == FP8 if is_fp8 else cache.dtype in DTYPES
        if cache.shape[1] in PAGE_SIZES and served:
            return
        raise ArgumentError(
            "The Hopper kernel does not serve this cache.",
            got=f"pages of {cache.shape[1]}, {cache.dtype}, "
            f"kv_scale {'given' if is_fp8 else 'not given'}",
            allowed=f"pages of {PAGE_SIZES}; {DTYPES} without a scale, {FP8} with one",
            fix="use the portable kernel",
        )


def _given(value: int | None, default: int) -> int:
    return default if value is None else value
