"""Where a rewrite's padded rows and repeated tables live: made once, never moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.dcp.lengths import local_seq_lens
from mla_decode.dtypes import torch_dtype
from mla_decode.mask import Mask
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.device import DeviceInfo
    from mla_decode.lowering.plan import Rewrite
    from mla_decode.problem import DecodeProblem


class VirtualTables:
    """Each request's table row and length, repeated for its virtual requests.

    Virtual request j of request r stands at r * num_virtual + j. All work is on the
    device, without a synchronisation, into buffers that graphs may record.
    """

    def __init__(
        self, problem: DecodeProblem, rewrite: Rewrite, device: torch.device
    ) -> None:
        self._rewrite = rewrite
        self._dcp = problem.dcp
        num_virtual = rewrite.num_virtual
        rows = problem.max_num_reqs * num_virtual
        requests = torch.arange(problem.max_num_reqs, device=device)
        self._row_of = requests.repeat_interleave(num_virtual)
        tokens = torch.arange(num_virtual, dtype=torch.int32, device=device)
        self._hidden = (rewrite.query_len - 1 - tokens).repeat(problem.max_num_reqs)
        self._table = torch.zeros(
            (rows, problem.table_width), dtype=torch.int32, device=device
        )
        self._lens = torch.zeros(rows, dtype=torch.int32, device=device)

    def fill(
        self, table: Tensor, lens: Tensor, totals: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Repeat a batch's table and lengths; returns views of the buffers."""
        rows = lens.shape[0] * self._rewrite.num_virtual
        row_of = self._row_of[:rows]
        width = min(table.shape[1], self._table.shape[1])
        virtual_table = self._table[:rows, :width]
        virtual_table.copy_(table[:, :width].index_select(0, row_of))
        virtual_lens = self._lens[:rows]
        if self._rewrite.mask is Mask.NON_CAUSAL:
            torch.index_select(lens, 0, row_of, out=virtual_lens)
            return virtual_table, virtual_lens
        source = lens if totals is None else totals
        visible = (source.index_select(0, row_of) - self._hidden[:rows]).clamp_(min=0)
        if self._dcp is not None:
            visible = local_seq_lens(visible, self._dcp)
        virtual_lens.copy_(visible)
        return virtual_table, virtual_lens


class PaddedRows:
    """Query, output and LSE with the rewrite's pad rows in them.

    Pad rows of the query are zero from construction and nothing writes them: they are
    inert for the rows beside them, and are dropped on the way back.
    """

    def __init__(
        self, problem: DecodeProblem, rewrite: Rewrite, device: DeviceInfo
    ) -> None:
        self._rewrite = rewrite
        lowered = rewrite.lowered
        where = torch.device(device.torch_device)
        tokens = lowered.max_num_reqs * lowered.max_query_len
        rows = (tokens, lowered.num_q_heads)
        q_dtype = torch_dtype(problem.q_dtype, device)
        out_dtype = torch_dtype(problem.out_dtype, device)
        self._q = torch.zeros((*rows, ROW_WIDTH), dtype=q_dtype, device=where)
        self._out = torch.zeros((*rows, LATENT_WIDTH), dtype=out_dtype, device=where)
        self._lse: Tensor | None = None
        if problem.needs_lse:
            self._lse = torch.zeros(rows, dtype=torch.float32, device=where)

    def enter(
        self, query: Tensor, num_reqs: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copy the query in; returns (q, out, lse) for the kernel."""
        rows = num_reqs * self._rewrite.num_virtual
        rows *= self._rewrite.lowered.max_query_len
        padded = self._q[:rows]
        for real, inside in self._pieces(query, padded, num_reqs):
            inside.copy_(real)
        return padded, self._out[:rows], None if self._lse is None else self._lse[:rows]

    def leave(self, padded: Tensor, real_rows: Tensor, num_reqs: int) -> None:
        """Copy the real rows of the kernel's out or lse to the caller's tensor."""
        for real, inside in self._pieces(real_rows, padded, num_reqs):
            real.copy_(inside)

    def _pieces(
        self, rows: Tensor, padded: Tensor, num_reqs: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs of equal views: of the contract's rows, and of the padded rows.

        rows is [num_reqs * Q, H, ...]; padded has the same trailing axes. Whole groups
        are one pair, the last group's rest another. An unfolded block's groups are its
        tokens.
        """
        rewrite = self._rewrite
        group = rewrite.group if rewrite.is_folded else 1
        heads, tail = rows.shape[1], rows.shape[2:]
        full, rest = divmod(rewrite.query_len, group)
        outside = rows.view(num_reqs, rewrite.query_len * heads, *tail)
        inside = padded.view(num_reqs, -1, *padded.shape[1:])
        whole = full * group * heads
        pairs = [
            (
                outside[:, :whole].view(num_reqs, full, group * heads, *tail),
                inside[:, :full, : group * heads],
            )
        ]
        if rest:
            pairs.append((outside[:, whole:], inside[:, full, : rest * heads]))
        return pairs
