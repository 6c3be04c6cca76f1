"""Buffers whose addresses a captured graph may record: made once, never moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.problem import DecodeProblem


class StableBuffers:
    """A step's table, lengths and ragged block starts at the addresses of all steps.

    Sized for the problem's largest batch at construction. Copies go to the current
    stream and synchronise with nothing.

    Args:
        problem: Sizes the buffers.
        device: Where they live.
    """

    def __init__(self, problem: DecodeProblem, device: torch.device) -> None:
        rows = problem.max_num_reqs

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._table = buffer(rows, problem.table_width)
        self._lens, self._totals = buffer(rows), buffer(rows)
        self._starts = buffer(rows + 1)

    def fill(
        self, table: Tensor, lens: Tensor, totals: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copy a step's table and lengths in; returns views of the buffers.

        Columns past the step's table keep what they held: no length reaches them.
        """
        num_reqs = lens.shape[0]
        width = min(table.shape[1], self._table.shape[1])
        stable = self._table[:num_reqs]
        stable[:, :width].copy_(table[:, :width], non_blocking=True)
        stable_lens = self._lens[:num_reqs].copy_(lens, non_blocking=True)
        if totals is not None:
            totals = self._totals[:num_reqs].copy_(totals, non_blocking=True)
        return stable, stable_lens, totals

    def fill_starts(self, starts: Tensor) -> Tensor:
        """Copy a ragged batch's block starts in; uniform ones are constants."""
        return self._starts[: starts.shape[0]].copy_(starts, non_blocking=True)
