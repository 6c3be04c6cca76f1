"""What the host can check of a batch, once a build, before a buffer is touched."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mla_decode.errors import BackendRefused, BatchError
from mla_decode.mask import Mask
from mla_decode.refusal import Refusal, RefusalCode

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """A batch's launch shape."""

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
) -> BatchShape:
    """Validate every host-visible property of a batch and return its shape.

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
    lengths = _block_lengths(common.query_start_loc_cpu, num_reqs)
    shape = _shape(common, lengths, uniform=not causal or _is_uniform(support))
    _check_named(problem, lengths, shape, causal=causal)
    if support is QueryLenSupport.SINGLE and shape.query_len != 1:
        raise BatchError(
            "The builder serves one token a request.",
            got=f"blocks of {sorted(set(lengths.tolist()))} tokens",
            allowed="1",
            fix="choose a backend whose query_len_support is UNIFORM or VARLEN",
        )
    _check_lengths(common, problem, shape, causal=causal)
    _check_tensors(common, problem, device)
    return shape


def _is_uniform(support: QueryLenSupport) -> bool:
    return support is not QueryLenSupport.VARLEN


def _block_lengths(starts: torch.Tensor, num_reqs: int) -> NDArray[np.int32]:
    is_host = isinstance(starts, torch.Tensor) and starts.device.type == "cpu"
    if not is_host or starts.dtype != torch.int32 or starts.shape != (num_reqs + 1,):
        raise BatchError(
            "query_start_loc_cpu has the wrong form.",
            got=_form(starts),
            allowed=f"int32 [{num_reqs + 1}] on cpu",
            fix="pass the host copy of query_start_loc, one entry more than requests",
        )
    values = starts.numpy()
    lengths: NDArray[np.int32] = np.diff(values)
    if values[0] != 0 or (lengths < 0).any():
        raise BatchError(
            "query_start_loc_cpu is not a cumulative sum from 0.",
            got=str(values.tolist()),
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
    common: CommonAttentionMetadata, lengths: NDArray[np.int32], *, uniform: bool
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
    if type(common.max_query_len) is not int or common.max_query_len < query_len:
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
    if tokens < real:
        raise BatchError(
            "num_actual_tokens is smaller than the blocks.",
            got=repr(tokens),
            allowed=f"at least {real}",
            fix="pass query_start_loc_cpu[-1], plus pad rows if any",
        )
    return BatchShape(num_reqs=num_reqs, query_len=0, num_decode_tokens=tokens)


def _check_named(
    problem: DecodeProblem,
    lengths: NDArray[np.int32],
    shape: BatchShape,
    *,
    causal: bool,
) -> None:
    used = {shape.query_len} if shape.query_len else set(lengths.tolist()) - {0}
    mask = Mask.CAUSAL if causal else Mask.NON_CAUSAL
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
    if mask not in problem.masks and used != {1}:
        refusals.append(
            Refusal(
                code=RefusalCode.MASK,
                message="The batch has a mask that the problem does not name",
                got=mask.value,
                allowed=" ".join(sorted(m.value for m in problem.masks)),
                fix="name every mask in DecodeProblem.masks",
            )
        )
    if refusals:
        raise BackendRefused("This batch is outside the problem.", {"build": refusals})


def _check_lengths(
    common: CommonAttentionMetadata,
    problem: DecodeProblem,
    shape: BatchShape,
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
    if causal and problem.dcp is None and 0 < longest < shape.query_len:
        raise BatchError(
            "A causal block is longer than its sequence.",
            got=f"max_seq_len {longest} with blocks of {shape.query_len}",
            allowed=f"0, or at least {shape.query_len}",
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
