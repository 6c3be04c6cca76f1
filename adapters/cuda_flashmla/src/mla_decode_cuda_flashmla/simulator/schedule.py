"""The scheduler: requests' pages dealt to work lists, in the layouts of both forms.

A work list (one a multiprocessor share) takes pages of consecutive requests until its
payload is used up; each request that it touches costs a fixed overhead on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_decode_cuda_flashmla.limits import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

OVERHEAD_PAGES = 5
ENTRY_INTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """What one share of the device walks: page ranges of consecutive requests."""

    first: int
    """First request; at or past the batch where the list is idle."""
    last: int
    """Last request, inclusive."""
    begin_page: int
    """Of the first request."""
    end_page: int
    """Of the last request, exclusive."""
    first_split: int
    """Which split of the first request this list's part is."""


def deal_pages(
    page_counts: Sequence[int], num_lists: int
) -> tuple[list[WorkList], list[int]]:
    """Deal pages to work lists.

    Args:
        page_counts: Pages of each request, as the scheduler counts them.
        num_lists: Work lists.

    Returns:
        The lists, and the cumulative number of splits before each request.
    """
    total = sum(count + OVERHEAD_PAGES for count in page_counts)
    payload = -(-total // num_lists) + OVERHEAD_PAGES
    lists, splits_before = [], [0]
    request = page = split = 0
    for _ in range(num_lists):
        first, begin_page, first_split = request, page, split
        left = payload
        while request < len(page_counts):
            rest = page_counts[request] - page
            if left >= rest + OVERHEAD_PAGES:
                splits_before.append(splits_before[-1] + split + 1)
                left -= rest + OVERHEAD_PAGES
                request, page, split = request + 1, 0, 0
                continue
            if left > OVERHEAD_PAGES:
                page, split = page + left - OVERHEAD_PAGES, split + 1
            break
        last = request if page else request - 1
        lists.append(
            WorkList(
                first=first,
                last=last,
                begin_page=begin_page,
                end_page=page or page_counts[last],
                first_split=first_split,
            )
        )
    return lists, splits_before


def sched_meta_schedule(seq_lens: Sequence[int], num_lists: int) -> list[Tensor]:
    """The 2026 layout: an empty request counts one page, and splits are marked."""
    counts = [max(-(-length // PAGE_SIZE), 1) for length in seq_lens]
    lists, splits_before = deal_pages(counts, num_lists)
    rows = []
    for work in lists:
        end = 0 if seq_lens[work.last] == 0 else work.end_page
        head = work.begin_page != 0
        tail = end != counts[work.last] and seq_lens[work.last] != 0
        if work.first == work.last:
            head = tail = head or tail
        rows.append(
            [
                work.first,
                work.last,
                work.begin_page,
                end,
                work.first_split,
                int(head),
                int(tail),
                0,
            ]
        )
    return _as_tensors(rows, splits_before)


def tile_metadata_schedule(seq_lens: Sequence[int], num_lists: int) -> list[Tensor]:
    """The 2025 layout: borders in tokens, an empty request counts no page."""
    counts = [-(-length // PAGE_SIZE) for length in seq_lens]
    lists, splits_before = deal_pages(counts, num_lists)
    rows = []
    for work in lists:
        ends = work.end_page == counts[work.last]
        end = seq_lens[work.last] if ends else work.end_page * PAGE_SIZE
        begin = work.begin_page * PAGE_SIZE
        rows.append([work.first, begin, work.last, end, work.first_split, 0, 0, 0])
    return _as_tensors(rows, splits_before)


def _as_tensors(rows: list[list[int]], splits_before: list[int]) -> list[Tensor]:
    return [
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(splits_before, dtype=torch.int32),
    ]
