"""The host side of the Hopper kernel: the launches of a step, on its buffers.

A step is `build` (one launch: the work table) and, for each layer, `forward` (two
launches: the kernel and the merge). All grids depend on the shape of the batch alone, and
all buffers keep their addresses, so both can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mla_decode_triton.hopper.boxes import (
    HeldBoxes,
    box_queries,
    hold,
    page_stride,
)
from mla_decode_triton.hopper.compat import hooks_are_set
from mla_decode_triton.hopper.grid import (
    Grid,
    WorkspaceSize,
    choose_grid,
    choose_merge,
)
from mla_decode_triton.hopper.known import LOG2E, Known, Launched, Layer
from mla_decode_triton.hopper.variants import FP8, Tuning, Variants
from mla_decode_triton.hopper.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from mla_decode.forward_check import CheckedCall
    from mla_decode_triton.hopper.boxes import Boxed
    from mla_decode_triton.hopper.direct import Directly
    from mla_decode_triton.hopper.grid import MergeShape


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
    variants: Variants = field(init=False)
    layers: dict[Hashable, Layer] = field(init=False, default_factory=dict)
    """By what they are chosen by: as many as batch sizes, at most."""
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
        self.variants = Variants(
            grid=self.grid,
            query_len=self.query_len,
            num_rows=self.num_rows,
            max_num_reqs=self.max_num_reqs,
            multiprocessors=self.multiprocessors,
            tuning=self.tuning,
        )
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
        variant = self.variants.plan()
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
        max_seq_len: int | None = None,
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
            max_seq_len: A bound of `seq_lens`, if one is known: few pieces are merged
                faster. Results do not depend on it.
        """
        if cache.dtype is torch.uint8:
            cache = cache.view(FP8)
        queries = self.boxes.queries(q_latent, q_rope)
        if queries is None:
            queries = box_queries(q_latent, q_rope, self.query_len, self.grid.rows)
        self.attend(
            *(queries, cache, table, seq_lens, out, lse),
            *(softmax_scale, causal, kv_scale),
            choose_merge(self.grid.parts, seq_lens.shape[0], max_seq_len),
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
        merge_shape: MergeShape,
    ) -> Launched:
        """Do as `forward` does, with queries that are boxed; fp8 is never uint8 here."""
        num_reqs, page_size = seq_lens.shape[0], cache.shape[1]
        types = queries[0].form, cache.dtype, out.dtype, kv_scale is None, lse is None
        key = types, page_size, causal, num_reqs, merge_shape
        layer = self.layers.get(key)
        if layer is None:
            layer = self.layers[key] = self.variants.layer(
                types, page_size, causal=causal, num_reqs=num_reqs, shape=merge_shape
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
        variant = self.variants.merge(shape, out.dtype, needs_lse=lse is not None)
        workspace = self.workspace
        tensors = (
            *(workspace.partial_out, workspace.partial_lse, out),
            *(workspace.partial_lse if lse is None else lse, workspace.schedule),
        )
        addresses = [tensor.data_ptr() for tensor in tensors]
        grid = self.variants.merge_grid(shape, num_reqs)
        variant.launch(grid, (), tensors, addresses, (self.num_rows,))
