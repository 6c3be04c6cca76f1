"""Mutants whose numbers are wrong: mask, lse, empty rows, pages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.mask import Mask
from mla_decode_contract.mutants.faulty import Block, Fault, faulty_decode, overwrite
from mla_decode_contract.mutants.mutant import derive
from mla_decode_contract.mutants.outputs import after

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mla_decode.backend import Backend


def with_fault(
    fault: Fault,
    backend: Backend,
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Backend:
    """A backend whose every call is checked as ever and then answered wrongly.

    Args:
        fault: In the decode.
        backend: What is wrapped.
        change: From the call's scales to those that the fault uses.
    """
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        result = right(self, q, kv_cache, metadata, **kwargs)
        names = ("softmax_scale", "q_scale", "kv_scale")
        scales = change({name: kwargs.get(name) for name in names})
        wrong = faulty_decode(
            fault,
            q,
            _as_floats(kv_cache, metadata),
            metadata,
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


def mask_one_too_many(backend: Backend) -> Backend:
    """Each token of a causal block sees its next sibling."""

    def visible(block: Block) -> Tensor:
        return (block.true_visible() + 1).clamp(max=block.seq_len)

    return with_fault(Fault(visible=visible), backend)


def mask_head_aligned(backend: Backend) -> Backend:
    """Token t of a causal block sees the first t + 1 keys of the request."""

    def visible(block: Block) -> Tensor:
        if not block.causal or block.query_len == 1:
            return block.true_visible()
        return (1 + torch.arange(block.query_len)).clamp(max=block.seq_len)

    return with_fault(Fault(visible=visible), backend)


def mask_rows_reversed(backend: Backend) -> Backend:
    """The rows of a causal block take each other's masks."""

    def visible(block: Block) -> Tensor:
        return block.true_visible().flip(0)

    return with_fault(Fault(visible=visible), backend)


def mask_always_causal(backend: Backend) -> Backend:
    """A non-causal block is served under the causal mask."""

    def visible(block: Block) -> Tensor:
        seen = block.seq_len - block.query_len + 1 + torch.arange(block.query_len)
        return seen.clamp(min=0)

    return with_fault(Fault(visible=visible), backend)


def mask_causal_at_one_length(backend: Backend) -> Backend:
    """Non-causal blocks of one length are served as causal: of 4, where declared."""

    def visible(block: Block) -> Tensor:
        seen = block.seq_len - block.query_len + 1 + torch.arange(block.query_len)
        return seen.clamp(min=0)

    return _at_one_length(Fault(visible=visible), backend, Mask.NON_CAUSAL, 4)


def mask_lost_at_one_length(backend: Backend) -> Backend:
    """Causal blocks of one length are served as non-causal: of 6, where declared."""

    def visible(block: Block) -> Tensor:
        return torch.full((block.query_len,), block.seq_len)

    return _at_one_length(Fault(visible=visible), backend, Mask.CAUSAL, 6)


def _at_one_length(fault: Fault, backend: Backend, mask: Mask, wanted: int) -> Backend:
    """A fault in blocks of the wanted length, or of the longest declared up to 8."""
    right = type(backend).forward
    wrong = type(with_fault(fault, backend)).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        length = metadata.query_len
        if metadata.builder is None or length < 2 or metadata.mask is not mask:
            return right(self, q, kv_cache, metadata, **kwargs)
        row = self.capability.row(metadata.builder.device_info.arch)
        allowed = () if row is None else row.query_lens.get(mask, ())
        lengths = (wanted, *range(8, 1, -1))
        chosen = next((one for one in lengths if one in allowed), wanted)
        answer = wrong if length == chosen else right
        return answer(self, q, kv_cache, metadata, **kwargs)

    return derive(backend, forward=forward)


def last_key_dropped(backend: Backend) -> Backend:
    """Every row misses the request's last key."""

    def visible(block: Block) -> Tensor:
        return block.true_visible().clamp(max=max(1, block.seq_len - 1))

    return with_fault(Fault(visible=visible), backend)


def requests_past_8_lost(backend: Backend) -> Backend:
    """Requests past the eighth are left out."""
    return _cut_at(8, backend)


def requests_past_64_lost(backend: Backend) -> Backend:
    """Requests past the 64th are left out."""
    return _cut_at(64, backend)


def _cut_at(count: int, backend: Backend) -> Backend:
    """Rows past some requests are 0; where fewer are declared, the last one's are."""

    def spoil(result: Any, metadata: Any, _: Any) -> Any:
        row = backend.capability.row(metadata.builder.device_info.arch)
        most = count + 1 if row is None else row.max_num_reqs or count + 1
        kept = min(count, most - 1)
        if metadata.num_reqs > kept:
            result.out[int(metadata.query_start_loc[kept]) :] = 0
        return result

    return after(backend, spoil)


def whole_pages_only(backend: Backend) -> Backend:
    """Keys of a page that is not full are left out, unless it is the only one."""

    def visible(block: Block) -> Tensor:
        full = block.seq_len // block.page_size * block.page_size
        return block.true_visible().clamp(max=full or block.seq_len)

    return with_fault(Fault(visible=visible), backend)


def pages_reversed(backend: Backend) -> Backend:
    """A request's pages are walked from the last, the length counted from there."""
    return with_fault(Fault(pages=lambda used: used.flip(0)), backend)


def first_page_repeated(backend: Backend) -> Backend:
    """Every page of a request is taken to be its first."""
    return with_fault(Fault(pages=lambda used: used[:1].expand_as(used)), backend)


def page_after_each(backend: Backend) -> Backend:
    """The table is read one entry late in the cache: page p is read as p + 1."""
    return with_fault(Fault(pages=lambda used: used + 1), backend)


def _with_scales(
    backend: Backend, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> Backend:
    return with_fault(Fault(), backend, change)


def scale_of_576(backend: Backend) -> Backend:
    """The scale is taken from the absorbed width, whatever the caller says."""
    return _with_scales(backend, lambda s: {**s, "softmax_scale": 576**-0.5})


def scale_squared(backend: Backend) -> Backend:
    """The scale is applied to the query and to the scores."""
    return _with_scales(
        backend, lambda s: {**s, "softmax_scale": s["softmax_scale"] ** 2}
    )


def fp8_scales_ignored(backend: Backend) -> Backend:
    """fp8 data are taken at their stored size."""
    return _with_scales(backend, lambda s: {**s, "q_scale": None, "kv_scale": None})


def dcp_global_lengths(backend: Backend) -> Backend:
    """Under DCP the global lengths are walked on the rank's own pages."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        result = right(self, q, kv_cache, metadata, **kwargs)
        if metadata.dcp_tot_seq_lens is None:
            return result
        most = metadata.block_table.shape[1] * kv_cache.shape[1]
        lens = [min(n, most) for n in metadata.dcp_tot_seq_lens.tolist()]
        wrong = faulty_decode(
            Fault(),
            q,
            kv_cache,
            metadata,
            lens=lens,
            softmax_scale=kwargs["softmax_scale"],
            q_scale=kwargs.get("q_scale"),
            kv_scale=kwargs.get("kv_scale"),
        )
        return overwrite(result, *wrong)

    return derive(backend, forward=forward)
