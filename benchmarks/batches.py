"""Uniform batches over given pages, in the contract's words: what benchmarks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode import CommonAttentionMetadata

if TYPE_CHECKING:
    from torch import Tensor

SCALE = 192**-0.5
"""DeepSeek-V3's softmax scale."""


def uniform_batch(
    table: Tensor,
    seq_lens: Tensor,
    *,
    query_len: int,
    max_seq_len: int,
    causal: bool,
    num_pads: int = 0,
) -> CommonAttentionMetadata:
    """A batch of one block length.

    Args:
        table: int32 [requests, width] on the device.
        seq_lens: int32 [requests] on the device; 0 for pads.
        query_len: Q of every request that is no pad.
        max_seq_len: An upper bound of the lengths.
        causal: The mask.
        num_pads: Requests at the tail without a query token; their rows are counted.
    """
    count = seq_lens.shape[0]
    blocks = torch.full((count,), query_len, dtype=torch.int32)
    blocks[count - num_pads :] = 0
    starts = torch.zeros(count + 1, dtype=torch.int32)
    starts[1:] = blocks.cumsum(0)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(seq_lens.device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=count,
        num_actual_tokens=count * query_len,
        max_query_len=query_len,
        max_seq_len=max_seq_len,
        block_table_tensor=table,
        causal=causal,
    )
