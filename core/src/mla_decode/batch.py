"""What the host can check of a batch, once a build, before a buffer is touched."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mla_decode.errors import BackendRefused, BatchError
from mla_decode.mask import Mask
from mla_decode.refusal import Refusal, RefusalCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from mla_decode.metadata import CommonAttentionMetadata
    from mla_decode.problem import DecodeProblem


class QueryLenSupport(enum.Enum):
    """Which block lengths one batch may mix."""

    SINGLE = "single"
    """One token a request."""
    UNIFORM = "uniform"
    """One length for all requests of the batch."""
    VARLEN = "varlen"
    """Any mix, under the causal mask."""


class BatchShape(NamedTuple):
    """A batch's launch shape; a tuple, for one is made in every build."""

    num_reqs: int
    query_len: int
    """Q of a uniform batch; 0 where the batch is ragged."""
    num_decode_tokens: int
    """Rows of q: num_reqs * Q, or what a ragged batch holds, pads included."""


def check_batch(
    common: CommonAttentionMetadata,
    problem: DecodeProblem,
    *,
    causal: bool,
    support: QueryLenSupport,
    device: torch.device,
    block_starts: Callable[[int, int], Tensor],
) -> BatchShape:
    """Validate every host-visible property of a batch and return its shape.

    Args:
        common: The batch.
        problem: What it must lie within.
        causal: Its mask.
        support: Which block lengths the builder may mix.
        device: Where its tensors must live.
        block_starts: Gives the int32 block starts, on the host, of so many requests
            with blocks of one length that the problem names.

    Raises:
        BatchError: The batch breaks the contract.
        BackendRefused: Its block length or mask is not one that the problem names.
    """
    num_reqs = common.num_reqs
    if type(num_reqs) is not int or not 1 <= num_reqs <= problem.max_num_reqs:
        raise BatchError(
            "num_reqs is outside what the problem was sized for.",
            got=repr(num_reqs),
            allowed=f"1..{problem.max_num_reqs}",
            fix="skip the call for an empty batch; raise max_num_reqs for a larger one",
        )
    host_starts = common.query_start_loc_cpu
    _check_host_starts(host_starts, num_reqs)
    query_len = common.max_query_len
    if type(query_len) is not int or query_len < 1:
        raise BatchError(
            "max_query_len is not a positive int.",
            got=repr(query_len),
            allowed="the longest block; the Q of a batch that is all pads",
            fix="pass the longest query length of the batch as a host int",
        )
    tokens = common.num_actual_tokens
    if type(tokens) is not int:
        raise BatchError(
            "num_actual_tokens is not an int.",
            got=repr(tokens),
            allowed="query_start_loc_cpu[-1], or more with pad rows",
            fix="pass the query tokens of the batch as a host int",
        )
    used = frozenset((query_len,))
    if (  # a uniform batch without pads, the case to be fast in
        tokens == num_reqs * query_len
        and query_len in problem.query_lens
        and torch.equal(host_starts, block_starts(num_reqs, query_len))
    ):
        shape = BatchShape(
            num_reqs=num_reqs, query_len=query_len, num_decode_tokens=tokens
        )
    else:
        lengths = _block_lengths(host_starts.numpy())
        is_uniform = not causal or support is not QueryLenSupport.VARLEN
        shape = _shape(common, problem, lengths, uniform=is_uniform)
        used = frozenset(lengths.tolist()) - {0} or frozenset((query_len,))
    _check_named(problem, used, causal=causal)
    if support is QueryLenSupport.SINGLE and shape.query_len != 1:
        raise BatchError(
            "The builder serves one token a request.",
            got=f"blocks of {sorted(used)} tokens",
            allowed="1",
            fix="choose a backend whose query_len_support is UNIFORM or VARLEN",
        )
    _check_lengths(common, problem, used, causal=causal)
    _check_tensors(common, problem, device)
    return shape


def _check_host_starts(starts: torch.Tensor, num_reqs: int) -> None:
    is_host = (
        isinstance(starts, torch.Tensor)
        and starts.is_cpu
        and starts.layout is torch.strided
    )
    if not is_host or starts.dtype != torch.int32 or starts.shape != (num_reqs + 1,):
        raise BatchError(
            "query_start_loc_cpu has the wrong form.",
            got=_form(starts),
            allowed=f"int32 [{num_reqs + 1}] on cpu",
            fix="pass the host copy of query_start_loc, one entry more than requests",
        )


def _block_lengths(starts: NDArray[np.int32]) -> NDArray[np.int32]:
    lengths: NDArray[np.int32] = np.diff(starts)
    if starts[0] != 0 or (lengths < 0).any():
        raise BatchError(
            "query_start_loc_cpu is not a cumulative sum from 0.",
            got=str(starts.tolist()),
            allowed="0 first, never decreasing",
            fix="pass the exclusive cumulative sum of the query lengths",
        )
    num_active = int((lengths > 0).sum())
    if (lengths[:num_active] == 0).any():
        raise BatchError(
            "A pad request stands before a real one.",
            got=f"query lengths {lengths.tolist()}",
            allowed="requests with query length 0 at the tail only",
            fix="reorder the batch so that pads come last",
        )
    return lengths


def _shape(
    common: CommonAttentionMetadata,
    problem: DecodeProblem,
    lengths: NDArray[np.int32],
    *,
    uniform: bool,
) -> BatchShape:
    num_reqs, tokens = common.num_reqs, common.num_actual_tokens
    longest = int(lengths.max())
    query_len = longest or common.max_query_len
    is_uniform = bool(((lengths == query_len) | (lengths == 0)).all())
    if uniform and not is_uniform:
        raise BatchError(
            "The batch mixes block lengths.",
            got=f"query lengths {lengths.tolist()}",
            allowed="one length for all requests (0 for pads at the tail)",
            fix="split the batch by block length, or use a VARLEN builder if causal",
        )
    if common.max_query_len < query_len:
        raise BatchError(
            "max_query_len is smaller than a block of the batch.",
            got=f"{common.max_query_len!r} with query lengths {lengths.tolist()}",
            allowed=f"at least {query_len}",
            fix="pass the longest query length of the batch",
        )
    real = int(lengths.sum())
    padded = num_reqs * query_len
    if is_uniform:
        if tokens not in {real, padded}:
            raise BatchError(
                "num_actual_tokens fits neither the blocks nor the padded batch.",
                got=repr(tokens),
                allowed=f"{real} or {padded}",
                fix="pass query_start_loc_cpu[-1], or num_reqs * Q for a padded batch",
            )
        return BatchShape(
            num_reqs=num_reqs, query_len=query_len, num_decode_tokens=padded
        )
    most = problem.max_num_reqs * problem.max_query_len
    if not real <= tokens <= max(real, most):
        raise BatchError(
            "num_actual_tokens does not fit the blocks of the batch.",
            got=repr(tokens),
            allowed=f"{real}, or up to {most} with pad rows",
            fix="pass query_start_loc_cpu[-1], plus pad rows if any",
        )
    return BatchShape(num_reqs=num_reqs, query_len=0, num_decode_tokens=tokens)


def _check_named(problem: DecodeProblem, used: frozenset[int], *, causal: bool) -> None:
    mask = Mask.CAUSAL if causal else Mask.NON_CAUSAL
    is_named = mask in problem.masks or used == {1}
    if is_named and used <= problem.query_lens:
        return
    refusals = []
    if not used <= problem.query_lens:
        refusals.append(
            Refusal(
                code=RefusalCode.QUERY_LEN,
                message="The batch has a block length that the problem does not name",
                got=str(sorted(used - problem.query_lens)),
                allowed=str(sorted(problem.query_lens)),
                fix="name every block length in DecodeProblem.query_lens",
            )
        )
    if not is_named:
        refusals.append(
            Refusal(
                code=RefusalCode.MASK,
                message="The batch has a mask that the problem does not name",
                got=mask.value,
                allowed=" ".join(sorted(m.value for m in problem.masks)),
                fix="name every mask in DecodeProblem.masks",
            )
        )
    raise BackendRefused("This batch is outside the problem.", {"build": refusals})


def _check_lengths(
    common: CommonAttentionMetadata,
    problem: DecodeProblem,
    used: frozenset[int],
    *,
    causal: bool,
) -> None:
    longest = common.max_seq_len
    if type(longest) is not int or not 0 <= longest <= problem.max_model_len:
        raise BatchError(
            "max_seq_len is outside what the problem was sized for.",
            got=repr(longest),
            allowed=f"0..{problem.max_model_len}",
            fix="pass an upper bound of seq_lens; raise max_model_len for longer ones",
        )
    shortest = min(used)  # a longer block may be that of an empty request
    if causal and problem.dcp is None and 0 < longest < shortest:
        raise BatchError(
            "A causal block is longer than its sequence.",
            got=f"max_seq_len {longest} with blocks of {shortest} and more",
            allowed=f"0, or at least {shortest}",
            fix="seq_lens include this step's tokens: add the block to them",
        )


def _check_tensors(
    common: CommonAttentionMetadata, problem: DecodeProblem, device: torch.device
) -> None:
    num_reqs = common.num_reqs
    _check_vector("query_start_loc", common.query_start_loc, num_reqs + 1, device)
    _check_vector("seq_lens", common.seq_lens, num_reqs, device)
    if problem.dcp is not None:
        _check_vector("dcp_local_seq_lens", common.dcp_local_seq_lens, num_reqs, device)
    elif common.dcp_local_seq_lens is not None:
        raise BatchError(
            "The batch has local lengths but the problem names no group of ranks.",
            got="dcp_local_seq_lens",
            allowed="None where DecodeProblem.dcp is None",
            fix="set DecodeProblem.dcp, or leave dcp_local_seq_lens out",
        )
    table = common.block_table_tensor
    pages = -(-common.max_seq_len // problem.page_size)
    if (
        not isinstance(table, torch.Tensor)
        or table.dtype != torch.int32
        or table.device != device
        or table.dim() != 2
        or table.shape[0] < num_reqs
        or table.shape[1] < pages
        or (table.shape[1] > 1 and table.stride(1) != 1)
    ):
        raise BatchError(
            "block_table_tensor has the wrong form.",
            got=_form(table),
            allowed=f"int32 [>= {num_reqs}, >= {pages}] on {device}, rows contiguous",
            fix="pass the table of this group's cache, one row a request",
        )


def _check_vector(name: str, tensor: object, size: int, device: torch.device) -> None:
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.dtype != torch.int32
        or tensor.shape != (size,)
        or tensor.device != device
        or not tensor.is_contiguous()
    ):
        raise BatchError(
            f"{name} has the wrong form.",
            got=_form(tensor),
            allowed=f"int32 [{size}] on {device}, contiguous",
            fix=f"pass {name} sliced to this batch, on the builder's device",
        )


def _form(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    return (
        f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} "
        f"strides {list(value.stride())} on {value.device}"
    )
