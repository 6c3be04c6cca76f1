"""Buffers whose addresses a captured graph may record: made once, never moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
        self._views: dict[tuple[int, int], _Views] = {}

    def fill(
        self, table: Tensor, lens: Tensor, totals: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copy a step's table and lengths in; returns views of the buffers.

        Columns past the step's table keep what they held: no length reaches them. All
        copies are one call into torch, and one kernel where the table is as wide as the
        buffer.
        """
        width = self._table.shape[1]
        if table.shape[1] > width:
            table = table[:, :width]
        key = lens.shape[0], table.shape[1]
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = self._make_views(*key)
        if totals is None:
            into, values = [views.columns, views.lens], [table, lens]
        else:
            into = [views.columns, views.lens, views.totals]
            values = [table, lens, totals]
        torch._foreach_copy_(into, values)
        return views.table, views.lens, None if totals is None else views.totals

    def fill_starts(self, starts: Tensor) -> Tensor:
        """Copy a ragged batch's block starts in; uniform ones are constants."""
        return self._starts[: starts.shape[0]].copy_(starts, non_blocking=True)

    def _make_views(self, num_reqs: int, width: int) -> _Views:
        table = self._table[:num_reqs]
        return _Views(
            table, table[:, :width], self._lens[:num_reqs], self._totals[:num_reqs]
        )


class _Views(NamedTuple):
    """The buffers cut to a batch: made once a shape, for a slice costs as a copy does."""

    table: Tensor
    columns: Tensor
    """Of the table, those that the engine's table has."""
    lens: Tensor
    totals: Tensor
