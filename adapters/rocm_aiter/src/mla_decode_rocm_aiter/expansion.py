"""Block tables into AITER's list of cache rows, one entry a token."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_decode.problem import ROW_WIDTH

if TYPE_CHECKING:
    from mla_decode import DecodeProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUnits:
    """The cache seen as rows that begin at every multiple of one unit.

    Pages that lie back to back are rows of 576 elements. A gap between pages makes the
    unit smaller: rows then overlap, and the entries of the list count units.
    """

    unit: int
    """Elements from one row's beginning to the next one's."""
    per_page: int
    per_token: int

    @classmethod
    def of(cls, problem: DecodeProblem) -> RowUnits:
        """The largest unit in which both tokens and pages begin."""
        unit = math.gcd(ROW_WIDTH, problem.page_stride)
        return cls(
            unit=unit,
            per_page=problem.page_stride // unit,
            per_token=ROW_WIDTH // unit,
        )

    def rows_of(self, pages: int, page_size: int) -> int:
        """Rows of a cache of so many pages."""
        return (pages - 1) * self.per_page + (page_size - 1) * self.per_token + 1

    def view(self, cache: Tensor) -> Tensor:
        """The cache [pages, page_size, 576] as AITER's [rows, 1, 1, 576]."""
        if self.unit == ROW_WIDTH and cache.is_contiguous():
            return cache.view(-1, 1, 1, ROW_WIDTH)
        return cache.as_strided(
            (self.rows_of(cache.shape[0], cache.shape[1]), 1, 1, ROW_WIDTH),
            (self.unit, ROW_WIDTH, ROW_WIDTH, 1),
        )


def expand_pages(
    block_table: Tensor,
    indptr: Tensor,
    out: Tensor,
    *,
    max_seq_len: int,
    page_size: int,
    units: RowUnits,
) -> None:
    """Write the cache row of every token of every request, in one kernel.

    Table slots past a request's pages are not read, and entries past the last token
    are not written. Arithmetic is 64-bit.

    Args:
        block_table: int32 [requests, width], any row stride.
        indptr: int32 [requests + 1], first entry of each request.
        out: int32, at least as long as all requests together.
        max_seq_len: Bounds every request's length, on the host.
        page_size: Tokens of a page.
        units: How rows are counted.
    """
    if out.device.type == "cpu":
        _expand_on_cpu(
            block_table, indptr, out, page_size, units.per_page, units.per_token
        )
        return
    from mla_decode_rocm_aiter.expansion_kernel import (  # noqa: PLC0415 - imports Triton
        launch_expansion,
    )

    launch_expansion(block_table, indptr, out, max_seq_len, page_size, units)


@torch.library.custom_op(
    "mla_decode_rocm_aiter::expand_pages", mutates_args=("out",), device_types="cpu"
)
def _expand_on_cpu(
    block_table: Tensor,
    indptr: Tensor,
    out: Tensor,
    page_size: int,
    per_page: int,
    per_token: int,
) -> None:
    """What the kernel does, request by request: on a CPU lengths are at hand."""
    starts = indptr.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        tokens = torch.arange(end - start)
        pages = block_table[request].long()[: -(-(end - start) // page_size)]
        rows = pages[tokens // page_size] * per_page + tokens % page_size * per_token
        out[start:end] = rows.int()
