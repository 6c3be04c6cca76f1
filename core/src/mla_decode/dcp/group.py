"""One fused collective a step: partial outputs and their LSE travel together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mla_decode.backend import DecodeOutput
from mla_decode.dcp.merge import merge_partials
from mla_decode.device import as_device_info
from mla_decode.dtypes import torch_dtype
from mla_decode.errors import ArgumentError
from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed it and warns under the old name."""


class DcpMerger:
    """Merges the partial results of a decode-context group over `torch.distributed`.

    A row of the message is 512 outputs and the row's LSE, whose four bytes ride as
    elements of the output's dtype: outputs and LSE arrive together, in one collective.
    Messages live in buffers made at construction, so that a graph may record the step
    where the collective library allows it (NCCL does, gloo does not).

    Args:
        problem: The rank's problem; ``dcp`` names the group's size and this rank.
        group: The process group; None is the default group.
        device: Where the outputs live.
        scatter_heads: True: each rank gets ``H / world`` heads, its own, merged
            (one all-to-all). False: every rank gets all heads (one all-gather).

    Raises:
        ArgumentError: The problem has no DCP, the group is not of its size or rank, or
            the heads do not divide.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        group: dist.ProcessGroup | None = None,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        scatter_heads: bool = True,
    ) -> None:
        self._world = _check_group(problem, group)
        self._group = group
        self._scatter = scatter_heads
        heads = problem.num_q_heads
        if scatter_heads and heads % self._world:
            raise ArgumentError(
                "The heads do not divide over the ranks.",
                got=f"{heads} heads over {self._world} ranks",
                allowed=f"a multiple of {self._world} heads",
                fix="pass scatter_heads=False: every rank then gets all heads",
            )
        info = as_device_info(device)
        self._dtype = torch_dtype(problem.out_dtype, info)
        lse_width = 4 // self._dtype.itemsize
        rows = problem.max_num_reqs * problem.max_query_len
        shape = (rows * heads * (LATENT_WIDTH + lse_width),)
        where = torch.device(info.torch_device)
        copies = 1 if scatter_heads else self._world
        self._sent = torch.empty(shape, dtype=self._dtype, device=where)
        self._received = torch.empty(
            (shape[0] * copies,), dtype=self._dtype, device=where
        )

    def merge(self, partial: DecodeOutput) -> DecodeOutput:
        """Merge this rank's partial result with the others'; every rank must call.

        Args:
            partial: ``out`` [T, H, 512] and ``lse`` [T, H] over this rank's keys.

        Returns:
            Merged ``out`` [T, H', 512] in the problem's out_dtype and ``lse`` float32
            [T, H'], newly allocated; H' is ``H / world``, or H without scatter.

        Raises:
            ArgumentError: The partial result has no LSE.
        """
        out, lse = partial
        if lse is None:
            raise ArgumentError(
                "The partial result has no LSE to merge by.",
                got="lse=None",
                allowed="float32 [T, H]",
                fix="set dcp in the DecodeProblem, which implies needs_lse",
            )
        tokens, heads, _ = out.shape
        width = LATENT_WIDTH + 4 // self._dtype.itemsize
        parts = self._world if self._scatter else 1
        sent = self._sent[: tokens * heads * width]
        rows = sent.view(parts, tokens, heads // parts, width)
        rows[..., :LATENT_WIDTH].copy_(_by_owner(out, parts))
        lse_words = lse.unsqueeze(-1).view(self._dtype)
        rows[..., LATENT_WIDTH:].copy_(_by_owner(lse_words, parts))
        if self._scatter:
            received = self._received[: sent.numel()]
            dist.all_to_all_single(received, sent, group=self._group)
        else:
            received = self._received[: sent.numel() * self._world]
            _all_gather(received, sent, group=self._group)
        partials = received.view(self._world, tokens, heads // parts, width)
        lses = partials[..., LATENT_WIDTH:].contiguous().view(torch.float32)
        merged, total = merge_partials(partials[..., :LATENT_WIDTH], lses.squeeze(-1))
        return DecodeOutput(merged.to(self._dtype), total)


def _by_owner(rows: Tensor, parts: int) -> Tensor:
    """[T, H, W] as [parts, T, H / parts, W]: the heads that each rank will own."""
    tokens, heads, width = rows.shape
    return rows.view(tokens, parts, heads // parts, width).transpose(0, 1)


def _check_group(problem: DecodeProblem, group: dist.ProcessGroup | None) -> int:
    dcp = problem.dcp
    if dcp is None:
        raise ArgumentError(
            "The problem has no decode context parallelism.",
            got="dcp=None",
            allowed="Dcp(world, rank, interleave)",
            fix="name the group in the DecodeProblem",
        )
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if (world, rank) != (dcp.world, dcp.rank):
        raise ArgumentError(
            "The process group is not the one that the problem names.",
            got=f"rank {rank} of {world}",
            allowed=f"rank {dcp.rank} of {dcp.world}",
            fix="build the Dcp from the group's own size and rank",
        )
    return world
