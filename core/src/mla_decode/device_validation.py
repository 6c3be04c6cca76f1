"""What only the device knows of a batch: checked on request, at the price of a sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.errors import BatchError

if TYPE_CHECKING:
    from mla_decode.batch import BatchShape
    from mla_decode.metadata import CommonAttentionMetadata
    from mla_decode.problem import DecodeProblem


def check_device_values(
    common: CommonAttentionMetadata,
    problem: DecodeProblem,
    shape: BatchShape,
    *,
    causal: bool,
) -> int:
    """Check lengths and used table slots; synchronises with the device.

    Returns:
        The highest page that a used table slot names, -1 where none is used: `forward`
        compares it with the cache.

    Raises:
        BatchError: A length or a used slot breaks the contract.
    """
    starts = common.query_start_loc.cpu()
    if not torch.equal(starts, common.query_start_loc_cpu):
        raise BatchError(
            "query_start_loc differs from its host copy.",
            got=str(starts.tolist()),
            allowed=str(common.query_start_loc_cpu.tolist()),
            fix="copy one from the other after the last change",
        )
    lens = common.seq_lens.cpu().long()
    query_lens = common.query_start_loc_cpu.diff().long()
    _check_lens(common, lens, query_lens, tail=causal and problem.dcp is None)
    if common.dcp_local_seq_lens is not None:
        lens = _local_lens(common.dcp_local_seq_lens.cpu().long(), lens)
    table = common.block_table_tensor[: shape.num_reqs].cpu().long()
    pages = -(-lens // problem.page_size)
    used = torch.arange(table.shape[1])[None, :] < pages[:, None]
    slots = table[used]
    if bool((slots < 0).any()):
        raise BatchError(
            "A used slot of the block table is negative.",
            got=str(slots[slots < 0][:8].tolist()),
            allowed="page numbers from 0 in every slot before ceil(seq_len/page_size)",
            fix="fill the request's slots before its step, or lower its seq_len",
        )
    return int(slots.max()) if slots.numel() else -1


def _check_lens(
    common: CommonAttentionMetadata,
    lens: torch.Tensor,
    query_lens: torch.Tensor,
    *,
    tail: bool,
) -> None:
    if bool((lens < 0).any()) or bool((lens > common.max_seq_len).any()):
        raise BatchError(
            "A seq_len lies outside its declared bound.",
            got=str(lens.tolist()),
            allowed=f"0..max_seq_len={common.max_seq_len}",
            fix="pass the true upper bound of seq_lens as max_seq_len",
        )
    pads = (query_lens == 0) & (lens > 0)
    if bool(pads.any()):
        raise BatchError(
            "A pad request has keys.",
            got=f"seq_lens {lens.tolist()} with query lengths {query_lens.tolist()}",
            allowed="seq_len 0 where the query length is 0",
            fix="zero the seq_lens of pad requests",
        )
    short = (lens > 0) & (lens < query_lens)
    if tail and bool(short.any()):
        raise BatchError(
            "A causal block is longer than its sequence.",
            got=f"seq_lens {lens.tolist()} with query lengths {query_lens.tolist()}",
            allowed="seq_len 0, or at least the block's length",
            fix="seq_lens include this step's tokens: add the block to them",
        )


def _local_lens(local: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    if bool((local < 0).any()) or bool((local > lens).any()):
        raise BatchError(
            "A rank holds more keys than the request has.",
            got=f"dcp_local_seq_lens {local.tolist()} of seq_lens {lens.tolist()}",
            allowed="0..seq_len of each request",
            fix="pass global lengths in seq_lens and this rank's in dcp_local_seq_lens",
        )
    return local
