"""Mutants that spoil what a right call returns: rows, heads, buffers, lse."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from mla_decode_contract.mutants.mutant import derive

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mla_decode.backend import Backend


def after(
    backend: Backend, spoil: Callable[[Any, Any, dict[str, Any]], Any]
) -> Backend:
    """A backend whose every result goes through ``spoil(result, metadata, kwargs)``."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        result = right(self, q, kv_cache, metadata, **kwargs)
        return spoil(result, metadata, kwargs)

    return derive(backend, forward=forward)


def _change_lse(backend: Backend, change: Callable[[Tensor], Tensor]) -> Backend:
    def spoil(result: Any, *_: Any) -> Any:
        if result.lse is not None:
            result.lse.copy_(change(result.lse.clone()))
        return result

    return after(backend, spoil)


def _change_out(backend: Backend, change: Callable[[Tensor], Tensor]) -> Backend:
    def spoil(result: Any, *_: Any) -> Any:
        result.out.copy_(change(result.out.clone()))
        return result

    return after(backend, spoil)


def lse_log2(backend: Backend) -> Backend:
    """The log-sum-exp comes to base 2."""
    return _change_lse(backend, lambda lse: lse / math.log(2.0))


def lse_negated(backend: Backend) -> Backend:
    """The log-sum-exp comes with its sign turned."""
    return _change_lse(backend, lambda lse: -lse)


def lse_exponentiated(backend: Backend) -> Backend:
    """The sum of exponentials comes without its logarithm."""
    return _change_lse(backend, torch.exp)


def lse_heads_rolled(backend: Backend) -> Backend:
    """Each head gets its neighbour's log-sum-exp."""
    return _change_lse(backend, lambda lse: lse.roll(1, dims=0).roll(1, dims=-1))


def lse_in_half(backend: Backend) -> Backend:
    """The log-sum-exp was kept in bfloat16 on the way."""
    return _change_lse(backend, lambda lse: lse.bfloat16().float())


def empty_lse_plus_inf(backend: Backend) -> Backend:
    """Rows without a key get lse +inf, as some libraries return it."""
    return _change_lse(backend, lambda lse: lse.masked_fill(lse.isneginf(), torch.inf))


def empty_lse_zero(backend: Backend) -> Backend:
    """Rows without a key get lse 0."""
    return _change_lse(backend, lambda lse: lse.masked_fill(lse.isneginf(), 0.0))


def empty_lse_nan(backend: Backend) -> Backend:
    """Rows without a key get lse NaN, as 0 / 0 leaves it."""
    return _change_lse(backend, lambda lse: lse.masked_fill(lse.isneginf(), torch.nan))


def empty_out_nan(backend: Backend) -> Backend:
    """Rows without a key get out NaN, as 0 / 0 leaves it."""

    def spoil(result: Any, metadata: Any, _: Any) -> Any:
        starts = metadata.query_start_loc.tolist()
        for request, seq_len in enumerate(metadata.seq_lens.tolist()):
            if seq_len == 0:
                result.out[starts[request] : starts[request + 1]] = torch.nan
        return result

    return after(backend, spoil)


def pad_rows_unwritten(backend: Backend) -> Backend:
    """Rows of pads keep what the buffer held."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        held = kwargs.get("out")
        before = None if held is None else held.clone()
        result = right(self, q, kv_cache, metadata, **kwargs)
        starts = metadata.query_start_loc.tolist()
        for request, seq_len in enumerate(metadata.seq_lens.tolist()):
            if seq_len == 0 and before is not None:
                rows = slice(starts[request], starts[request + 1])
                result.out[rows] = before[rows]
        return result

    return derive(backend, forward=forward)


def last_row_unwritten(backend: Backend) -> Backend:
    """The last row keeps what the buffer held."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        held = kwargs.get("out")
        before = None if held is None else held[-1:].clone()
        result = right(self, q, kv_cache, metadata, **kwargs)
        if before is not None:
            result.out[-1:] = before
        return result

    return derive(backend, forward=forward)


def out_not_in_place(backend: Backend) -> Backend:
    """The result comes in a new tensor; the caller's buffer keeps its contents."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = kwargs.get("out")
        if held is not None:
            kwargs["out"] = held.clone()
        return right(self, *args, **kwargs)

    return derive(backend, forward=forward)


def out_written_past_its_end(backend: Backend) -> Backend:
    """One element behind the caller's buffer is overwritten."""

    def spoil(result: Any, _: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out") is not None:
            out = kwargs["out"]
            end = out.storage_offset() + out.numel()
            out.as_strided((1,), (1,), end).fill_(0)
        return result

    return after(backend, spoil)


def out_written_before_its_start(backend: Backend) -> Backend:
    """One element before the caller's buffer is overwritten."""

    def spoil(result: Any, _: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out") is not None:
            out = kwargs["out"]
            out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0)
        return result

    return after(backend, spoil)


def last_head_copied(backend: Backend) -> Backend:
    """The last head is computed from the first one's query."""

    def change(out: Tensor) -> Tensor:
        out[:, -1] = out[:, 0]
        return out

    return _change_out(backend, change)


def heads_reversed(backend: Backend) -> Backend:
    """Heads come back in the opposite order."""
    return _change_out(backend, lambda out: out.flip(1))


def last_head_zero(backend: Backend) -> Backend:
    """A tile that does not divide the heads leaves the last one out."""

    def change(out: Tensor) -> Tensor:
        out[:, -1] = 0
        return out

    return _change_out(backend, change)


def noise_between_calls(backend: Backend) -> Backend:
    """Every call is a rounding apart from the last, and deterministic is True."""
    count = [0]

    def change(out: Tensor) -> Tensor:
        count[0] += 1
        return out * (1.0 + 2.0**-7 * (count[0] % 2))

    mutated = _change_out(backend, change)
    return derive(mutated, deterministic=True)


def bits_of_the_batch(backend: Backend) -> Backend:
    """Rows are a last bit apart where other requests are in the batch."""

    def spoil(result: Any, metadata: Any, _: Any) -> Any:
        if metadata.num_reqs > 1:
            result.out.copy_(_last_bits_turned(result.out))
        return result

    return after(backend, spoil)


def bits_of_the_block(backend: Backend) -> Backend:
    """Rows are a last bit apart where other tokens are in their block."""

    def spoil(result: Any, metadata: Any, _: Any) -> Any:
        if metadata.num_decode_tokens > metadata.num_reqs:
            result.out.copy_(_last_bits_turned(result.out))
        return result

    return after(backend, spoil)


def _last_bits_turned(out: Tensor) -> Tensor:
    whole = out.contiguous()
    bits = whole.view({2: torch.int16, 4: torch.int32}[whole.element_size()])
    return torch.where(whole == 0, whole, (bits ^ 1).view(whole.dtype))
