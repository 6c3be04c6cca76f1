"""One fused collective a step: partial outputs and their LSE travel together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mla_decode.backend import DecodeOutput
from mla_decode.dcp.message import MessageBuffers
from mla_decode.device import as_device_info
from mla_decode.dtypes import torch_dtype
from mla_decode.errors import ArgumentError
from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.dcp.message import Message
    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed it and warns under the old name."""


class DcpMerger:
    """Merges the partial results of a decode-context group over `torch.distributed`.

    Outputs and their LSE arrive together, in one collective. Messages live in buffers
    made at construction, so that a graph may record the step where the collective
    library allows it (NCCL does, gloo does not). Nothing but what is returned is
    allocated in a merge. One merger is for one step at a time: micro-batches that are
    under way together, on streams of their own, need one each.

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
        self._heads = heads
        self._dtype = torch_dtype(problem.out_dtype, info)
        self._max_tokens = problem.max_num_reqs * problem.max_query_len
        self._buffers = MessageBuffers(
            rows=self._max_tokens,
            heads=heads,
            world=self._world,
            parts=self._world if scatter_heads else 1,
            dtype=self._dtype,
            device=torch.device(info.torch_device),
        )
        self._tokens = -1
        self._message = self._buffers.message(0)

    def merge(self, partial: DecodeOutput) -> DecodeOutput:
        """Merge this rank's partial result with the others'; every rank must call.

        Args:
            partial: ``out`` [T, H, 512] and ``lse`` [T, H] over this rank's keys.

        Returns:
            Merged ``out`` [T, H', 512] in the problem's out_dtype and ``lse`` float32
            [T, H'], newly allocated; H' is ``H / world``, or H without scatter.

        Raises:
            ArgumentError: The partial result has no LSE, or is none of the problem's.
        """
        out, lse = partial
        if lse is None:
            raise ArgumentError(
                "The partial result has no LSE to merge by.",
                got="lse=None",
                allowed="float32 [T, H]",
                fix="set dcp in the DecodeProblem, which implies needs_lse",
            )
        message = self._message_for(out, lse)
        message.pack(out, lse)
        if self._scatter:
            dist.all_to_all_single(message.received, message.sent, group=self._group)
        else:
            _all_gather(message.received, message.sent, group=self._group)
        partials = message.partials
        merged = torch.empty_like(partials.mixed, dtype=self._dtype)
        return DecodeOutput(merged, partials.merge_into(merged))

    def _message_for(self, out: Tensor, lse: Tensor) -> Message:
        """The views for these tokens; the layers of a step share them."""
        tokens = out.shape[0]
        found = (*out.shape, out.dtype, *lse.shape, lse.dtype)
        row = (self._heads, LATENT_WIDTH, self._dtype)
        if (
            found != (tokens, *row, tokens, self._heads, torch.float32)
            or tokens > self._max_tokens
        ):
            raise ArgumentError(
                "The partial result is none of the problem's.",
                got=f"out {[*out.shape]} {out.dtype}, lse {[*lse.shape]} {lse.dtype}",
                allowed=f"out [T, {self._heads}, {LATENT_WIDTH}] {self._dtype}, lse "
                f"[T, {self._heads}] torch.float32, T up to {self._max_tokens}",
                fix="merge what the decoder of this problem returned",
            )
        if tokens != self._tokens:
            self._tokens, self._message = tokens, self._buffers.message(tokens)
        return self._message


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
