"""Mutants whose numbers are wrong: mask, lse, empty rows, pages."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from mla_decode_contract.mutants.faulty import Block, Fault, faulty_decode, overwrite
from mla_decode_contract.mutants.mutant import derive

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.backend import Backend


def with_fault(fault: Fault, backend: Backend) -> Backend:
    """A backend whose every call is checked as ever and then answered wrongly."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        result = right(self, q, kv_cache, metadata, **kwargs)
        scales = {name: kwargs.get(name) for name in ("q_scale", "kv_scale")}
        wrong = faulty_decode(
            fault,
            q,
            _as_floats(kv_cache, metadata),
            metadata,
            softmax_scale=kwargs["softmax_scale"],
            **scales,
        )
        return overwrite(result, *wrong)

    return derive(backend, forward=forward)


def _as_floats(kv_cache: Tensor, metadata: Any) -> Tensor:
    if kv_cache.dtype != torch.uint8:
        return kv_cache
    from mla_decode.dtypes import torch_dtype  # noqa: PLC0415 - fp8 caches alone

    return kv_cache.view(torch_dtype("fp8", metadata.builder.device_info))


def mask_ignored(backend: Backend) -> Backend:
    """Every token of a block sees every key, whatever the mask."""

    def visible(block: Block) -> Tensor:
        return torch.full((block.query_len,), block.seq_len)

    return with_fault(Fault(visible=visible), backend)


def mask_off_by_one(backend: Backend) -> Backend:
    """Each token of a block misses the last key that it should see."""

    def visible(block: Block) -> Tensor:
        seen = block.true_visible()
        return seen - 1 if block.query_len > 1 else seen

    return with_fault(Fault(visible=visible), backend)


def mask_prefix_only(backend: Backend) -> Backend:
    """A block sees the keys before it and none of its own."""

    def visible(block: Block) -> Tensor:
        if block.query_len == 1:
            return block.true_visible()
        before = max(0, block.seq_len - block.query_len)
        return torch.full((block.query_len,), before)

    return with_fault(Fault(visible=visible), backend)


def page_tail_read(backend: Backend) -> Backend:
    """The last page is read to its end."""

    def visible(block: Block) -> Tensor:
        whole = -(-block.seq_len // block.page_size) * block.page_size
        return block.true_visible() + (whole - block.seq_len)

    return with_fault(Fault(visible=visible), backend)


def logical_pages(backend: Backend) -> Backend:
    """Page j of a request is taken to be page j of the cache."""

    def pages(used: Tensor) -> Tensor:
        return torch.arange(used.shape[0])

    return with_fault(Fault(pages=pages), backend)


def lse_log2(backend: Backend) -> Backend:
    """The log-sum-exp comes to base 2."""
    return _with_lse(backend, lambda lse: lse / math.log(2.0))


def empty_lse_plus_inf(backend: Backend) -> Backend:
    """Rows without a key get +inf, as some libraries return it."""
    return _with_lse(backend, lambda lse: lse.masked_fill(lse.isneginf(), torch.inf))


def _with_lse(backend: Backend, change: Any) -> Backend:
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(self, *args, **kwargs)
        if result.lse is not None:
            result.lse.copy_(change(result.lse.clone()))
        return result

    return derive(backend, forward=forward)
