"""The kernel without a schedule: a fixed number of splits for every request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode_rocm_aiter.simulator.attention import attend, gather_keys

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode_rocm_aiter.simulator.stage1 import KernelCall


def run_split(call: KernelCall, out: Tensor, lse: Tensor | None) -> None:
    """Attend each request on its own; the number of splits changes nothing but rounding.

    Blocks whose length is no power of two: the kernel answers for the first token and
    gives the answer to every token of the block.
    """
    starts = call.query_starts.tolist()
    pages = call.page_starts.tolist()
    lens = call.last_page_lens.tolist()
    for batch in range(len(starts) - 1):
        first_row, last_row = starts[batch], starts[batch + 1]
        block = last_row - first_row
        if not block:
            continue
        first, last = pages[batch], pages[batch + 1]
        keys = gather_keys(call.cache, call.pages, first, last)
        seq_len = (
            (last - first - 1) * call.page_size + lens[batch]
            if call.page_size > 1 and last > first
            else last - first
        )
        tokens = torch.arange(block)
        visible = torch.full_like(tokens, seq_len)
        if call.masks:
            visible = (seq_len - block + tokens + 1).clamp(min=0)
        rows = slice(first_row, last_row)
        found, found_lse = attend(
            call.q[rows].float(), keys, visible, call.scale, call.rounding
        )
        found = found * call.out_scale
        if call.faults.equal_rows and block & (block - 1):
            found, found_lse = (
                found[:1].expand_as(found),
                found_lse[:1].expand_as(found_lse),
            )
        if call.faults.empty_row_nan:
            found = found.masked_fill(found_lse.isneginf()[..., None], torch.nan)
        out[rows] = found.to(out.dtype)
        if lse is not None:
            lse[rows] = found_lse
