"""Which keys of a request a rank holds when they are dealt round-robin."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.problem import Dcp

    Lengths = TypeVar("Lengths", int, Tensor)


def local_seq_lens(seq_lens: Lengths, dcp: Dcp) -> Lengths:
    """Keys that this rank holds of requests of these global lengths.

    Token i lives on rank ``(i // interleave) % world``. Works on ints and, without a
    synchronisation, on integer tensors of any device.

    Args:
        seq_lens: Global lengths, in tokens.
        dcp: The group and this rank.

    Returns:
        Local lengths: 10 tokens over 4 ranks, interleave 1, are 3, 3, 2, 2.
    """
    turn = dcp.world * dcp.interleave
    rest = seq_lens % turn - dcp.rank * dcp.interleave
    if isinstance(rest, int):
        rest = min(max(rest, 0), dcp.interleave)
    else:
        rest = rest.clamp(0, dcp.interleave)
    return seq_lens // turn * dcp.interleave + rest


def owned_tokens(seq_len: int, dcp: Dcp) -> Tensor:
    """Positions of the tokens that this rank holds, int64, ascending, on the CPU.

    The j-th of them lies at local position j: an engine writes token ``i`` of the
    sequence to the rank that owns it, at the number of owned tokens before it.
    """
    tokens = torch.arange(seq_len)
    return tokens[tokens // dcp.interleave % dcp.world == dcp.rank]
