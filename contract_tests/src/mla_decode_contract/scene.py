"""A batch with its tensors, everything that must not be read poisoned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode.metadata import CommonAttentionMetadata
from mla_decode.problem import ROW_WIDTH
from mla_decode.reference.oracle import decode_oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mla_decode.problem import DecodeProblem
    from mla_decode_contract.context import CaseContext

SOFTMAX_SCALE = 192**-0.5
"""DeepSeek-V3's scale; with unit normal data the scores' deviation is about 1.7."""
FREE_SLOT = -1
"""What unused table slots hold unless a case says otherwise."""
Q_SCALE, KV_SCALE = 0.25, 0.5
"""Scales of fp8 data, unlike each other and unlike 1."""
SPARE_PAGES = 3


@dataclass(slots=True, kw_only=True, eq=False)
class Scene:
    """A batch of a problem with the tensors of one layer."""

    ctx: CaseContext
    problem: DecodeProblem
    seq_lens: tuple[int, ...]
    """Keys of each request; under DCP this rank's share."""
    block_lens: tuple[int, ...]
    """Query tokens of each request; 0 for pads."""
    causal: bool
    common: CommonAttentionMetadata
    q: Tensor
    """[T, H, 576]; rows of pads are NaN."""
    kv_cache: Tensor
    """[P, S, 576]; slots past a request's length and unused pages are NaN."""
    softmax_scale: float
    q_scale: Tensor | None
    kv_scale: Tensor | None
    starts: tuple[int, ...]
    """Where each request's rows begin; the last entry ends the real rows."""
    q_scale_value: float
    """The query's scale on the host, 1 where there is none."""
    kv_scale_value: float
    """The cache's scale on the host, 1 where there is none."""

    @property
    def num_rows(self) -> int:
        """Rows of q, pads included."""
        return int(self.q.shape[0])

    def keys_of(self, request: int) -> Tensor:
        """One request's keys in order, [seq_len, 576] float64 on the CPU, unscaled."""
        seq_len, size = self.seq_lens[request], self.problem.page_size
        used = self.common.block_table_tensor[request, : -(-seq_len // size)]
        pages = self.kv_cache.index_select(0, used.long())
        return pages.cpu().double().reshape(-1, ROW_WIDTH)[:seq_len]

    def visible(self, request: int) -> Tensor:
        """Keys that each token of the request's block sees, int64 [Q]."""
        seq_len, query_len = self.seq_lens[request], self.block_lens[request]
        if not self.causal:
            return torch.full((query_len,), seq_len)
        return seq_len - query_len + 1 + torch.arange(query_len)

    def truth(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """The oracle's out [T, H, 512] and lse [T, H], float64 on the CPU.

        Args:
            changes: Arguments of `decode_oracle` to replace: a wrong one shows what a
                backend with that fault would give.
        """
        starts = torch.tensor(self.starts, dtype=torch.int32)
        arguments: dict[str, Any] = {
            "q": self.q,
            "kv_cache": self.kv_cache,
            "block_table": self.common.block_table_tensor.cpu(),
            "seq_lens": torch.tensor(self.seq_lens, dtype=torch.int32),
            "query_start_loc": starts,
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "q_scale": self.q_scale_value,
            "kv_scale": self.kv_scale_value,
            **changes,
        }
        return decode_oracle(**arguments)

    def with_common(self, **changes: Any) -> CommonAttentionMetadata:
        """The batch with some fields replaced."""
        return replace(self.common, **changes)


def draw_scene(
    ctx: CaseContext,
    problem: DecodeProblem,
    seq_lens: Sequence[int],
    *,
    query_len: int | None = None,
    block_lens: Sequence[int] | None = None,
    causal: bool = True,
    num_pads: int = 0,
    pad_rows: int = 0,
    counts_pads: bool = True,
    free_slot: int = FREE_SLOT,
    shared_pages: int = 0,
    softmax_scale: float = SOFTMAX_SCALE,
    q_gain: float = 1.0,
    global_lens: Sequence[int] | None = None,
) -> Scene:
    """Draw a batch with its tensors.

    Args:
        ctx: Whose generator draws.
        problem: Geometry and dtypes.
        seq_lens: Keys of each real request.
        query_len: Q of a uniform batch; the problem's longest block by default.
        block_lens: One length a request instead, for a ragged batch.
        causal: The mask.
        num_pads: Pad requests at the tail.
        pad_rows: Pad rows past a ragged batch's last block.
        counts_pads: Whether num_actual_tokens counts the rows of pad requests.
        free_slot: What unused table slots hold.
        shared_pages: Pages that all requests' tables begin with.
        softmax_scale: Multiplies q.k.
        q_gain: Multiplies the query: larger scores.
        global_lens: Global lengths under DCP; ``seq_lens`` are then local.
    """
    if query_len is None:
        query_len = problem.max_query_len
    real = [query_len] * len(seq_lens) if block_lens is None else list(block_lens)
    blocks = (*real, *([0] * num_pads))
    lens = (*seq_lens, *([0] * num_pads))
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + block)
    rows = len(blocks) * query_len if block_lens is None else starts[-1] + pad_rows
    counted = rows if counts_pads else starts[-1]
    table, cache = _paged_cache(ctx, problem, lens, free_slot, shared_pages)
    device = ctx.torch_device
    loc = torch.tensor(starts, dtype=torch.int32)
    totals = lens if global_lens is None else (*global_lens, *([0] * num_pads))
    local = None
    if problem.dcp is not None:
        local = torch.tensor(lens, dtype=torch.int32, device=device)
    common = CommonAttentionMetadata(
        query_start_loc=loc.to(device),
        query_start_loc_cpu=loc,
        seq_lens=torch.tensor(totals, dtype=torch.int32, device=device),
        num_reqs=len(blocks),
        num_actual_tokens=counted,
        max_query_len=max(query_len, *blocks),
        max_seq_len=max(totals),
        block_table_tensor=table,
        causal=causal,
        dcp_local_seq_lens=local,
    )
    q = _normal(ctx, (rows, problem.num_q_heads, ROW_WIDTH), problem.q_dtype, Q_SCALE)
    if q_gain != 1.0:
        q = (q.float() * q_gain).to(q.dtype)
    q = q.to(device)
    q.view(torch.uint8)[starts[-1] :] = 0xFF if q.itemsize > 1 else _nan_byte(q)
    return Scene(
        ctx=ctx,
        problem=problem,
        seq_lens=tuple(lens),
        block_lens=tuple(blocks),
        causal=causal,
        common=common,
        q=q,
        kv_cache=cache,
        softmax_scale=softmax_scale,
        q_scale=_scale(problem.q_dtype, Q_SCALE, device),
        kv_scale=_scale(problem.kv_dtype, KV_SCALE, device),
        starts=tuple(starts),
        q_scale_value=Q_SCALE if problem.q_dtype == "fp8" else 1.0,
        kv_scale_value=KV_SCALE if problem.kv_dtype == "fp8" else 1.0,
    )


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN, in place, whatever its float dtype; return it."""
    tensor.view(torch.uint8).fill_(_nan_byte(tensor))
    return tensor


def _nan_byte(tensor: Tensor) -> int:
    return 0x80 if tensor.dtype == torch.float8_e4m3fnuz else 0xFF


def _scale(dtype: str, value: float, device: torch.device) -> Tensor | None:
    if dtype != "fp8":
        return None
    return torch.tensor([value], dtype=torch.float32, device=device)


def _normal(
    ctx: CaseContext, shape: tuple[int, ...], dtype: str, scale: float
) -> Tensor:
    """Unit normal numbers after the scale, in the dtype, on the CPU."""
    numbers = torch.randn(shape, generator=ctx.generator)
    if dtype == "fp8":
        numbers = numbers / scale
    return numbers.to(torch_dtype(dtype, ctx.device))


def _paged_cache(
    ctx: CaseContext,
    problem: DecodeProblem,
    lens: Sequence[int],
    free_slot: int,
    shared_pages: int,
) -> tuple[Tensor, Tensor]:
    """A poisoned cache with each request's keys in pages of a shuffled order."""
    size = problem.page_size
    counts = [-(-length // size) for length in lens]
    total = sum(counts) + SPARE_PAGES
    order = torch.randperm(total, generator=ctx.generator).tolist()
    dtype = torch_dtype(problem.kv_dtype, ctx.device)
    storage = poison(torch.empty((total, problem.page_stride), dtype=dtype))
    cache = storage[:, : size * ROW_WIDTH].view(total, size, ROW_WIDTH)
    width = problem.table_width
    # The row stride is wider than the row, as in an engine's persistent table.
    wide = torch.full((len(lens) + 1, width + 3), free_slot, dtype=torch.int32)
    shared = [order.pop() for _ in range(shared_pages)]
    for request, (length, count) in enumerate(zip(lens, counts, strict=True)):
        own = [order.pop() for _ in range(count - min(count, shared_pages))]
        pages = [*shared[:count], *own]
        for position, page in enumerate(pages):
            wide[request, position] = page
            filled = min(size, length - position * size)
            rows = _normal(ctx, (filled, ROW_WIDTH), problem.kv_dtype, KV_SCALE)
            cache[page, :filled] = rows
    device = ctx.torch_device
    moved = storage.to(device)
    cache = moved[:, : size * ROW_WIDTH].view(total, size, ROW_WIDTH)
    return wide.to(device)[:, :width], cache
