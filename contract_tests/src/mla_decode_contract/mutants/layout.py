"""Mutants that take memory to lie as it often does: packed, near, on one thread."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from mla_decode_contract.mutants.faulty import Fault, faulty_decode, overwrite
from mla_decode_contract.mutants.mutant import derive, derive_builder
from mla_decode_contract.mutants.outputs import after
from mla_decode_contract.mutants.values import with_fault

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.backend import Backend

_BUILDS_IN_PLACE = 8


def address_in_32_bits(backend: Backend) -> Backend:
    """Pages past 2^31 elements are looked for at the cache's beginning."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        near = -(-(1 << 31) // kv_cache.stride(0))
        if kv_cache.shape[0] <= near:
            return right(self, q, kv_cache, metadata, **kwargs)
        result = right(self, q, kv_cache, metadata, **kwargs)
        wrong = faulty_decode(
            Fault(pages=lambda used: used % near),
            q,
            kv_cache,
            metadata,
            softmax_scale=kwargs["softmax_scale"],
            q_scale=kwargs.get("q_scale"),
            kv_scale=kwargs.get("kv_scale"),
        )
        return overwrite(result, *wrong)

    return derive(backend, forward=forward)


def query_taken_as_packed(backend: Backend) -> Backend:
    """The query's memory is read row after row, whatever its strides."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        taken: Any = tuple(map(_packed, q)) if isinstance(q, tuple) else _packed(q)
        return right(self, taken, *args, **kwargs)

    return derive(backend, forward=forward)


def _packed(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor
    size, storage = tensor.numel(), tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
    start = min(tensor.storage_offset(), flat.numel() - size)
    return flat[start : start + size].view(tensor.shape)


def weights_in_fp8(backend: Backend) -> Backend:
    """The softmax's weights are rounded to fp8 without a scale of their own."""

    def weights(exact: Tensor) -> Tensor:
        return exact.to(torch.float8_e4m3fn).double()

    return with_fault(Fault(weights=weights), backend)


def first_scale_kept(backend: Backend) -> Backend:
    """The first layer's fp8 scales serve all layers of a builder."""
    right = type(backend).forward
    first: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        given = {key: kwargs.get(key) for key in ("q_scale", "kv_scale")}
        if metadata.builder is None or given["kv_scale"] is None:
            return right(self, q, kv_cache, metadata, **kwargs)
        kept = first.setdefault(metadata.builder, given)
        result = right(self, q, kv_cache, metadata, **kwargs)
        if all(kept[key] is value for key, value in given.items()):
            return result
        wrong = faulty_decode(
            Fault(),
            q,
            kv_cache,
            metadata,
            softmax_scale=kwargs["softmax_scale"],
            **kept,
        )
        return overwrite(result, *wrong)

    return derive(backend, forward=forward)


def thread_of_the_build(backend: Backend) -> Backend:
    """A step that is run in another thread than it was built in comes out empty."""
    base: Any = backend.builder_cls
    here = threading.local()

    def _build_decode(
        self: Any,
        block_table_tensor: Any,
        seq_lens_device: Any,
        max_seq_len: Any,
        query_start_loc_cpu: Any,
        query_start_loc_device: Any,
        num_decode_tokens: Any,
        dcp_tot_seq_lens_device: Any,
    ) -> Any:
        if not hasattr(here, "builders"):
            here.builders = WeakSet()
        here.builders.add(self)
        return base._build_decode(  # noqa: SLF001 - the contract froze this name
            self,
            block_table_tensor=block_table_tensor,
            seq_lens_device=seq_lens_device,
            max_seq_len=max_seq_len,
            query_start_loc_cpu=query_start_loc_cpu,
            query_start_loc_device=query_start_loc_device,
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens_device=dcp_tot_seq_lens_device,
        )

    def spoil(result: Any, metadata: Any, _: Any) -> Any:
        if metadata.builder not in getattr(here, "builders", ()):
            result.out.zero_()
        return result

    builder = derive_builder(base, _build_decode=_build_decode)
    return derive(after(backend, spoil), builder_cls=property(lambda _: builder))


def last_odd_head_lost(backend: Backend) -> Backend:
    """One head past a multiple of 16 is cut off with the padding."""

    def spoil(result: Any, *_: Any) -> Any:
        heads = result.out.shape[1]
        if heads > 1 and heads % 16 == 1:
            result.out[:, -1] = 0
        return result

    return after(backend, spoil)


def buffers_renewed(backend: Backend) -> Backend:
    """After some builds the lengths move to a new buffer, which no graph knows."""
    base: Any = backend.builder_cls

    def _build_decode(
        self: Any,
        block_table_tensor: Any,
        seq_lens_device: Any,
        max_seq_len: Any,
        query_start_loc_cpu: Any,
        query_start_loc_device: Any,
        num_decode_tokens: Any,
        dcp_tot_seq_lens_device: Any,
    ) -> Any:
        self.mutant_builds = getattr(self, "mutant_builds", 0) + 1
        moved = self.mutant_builds > _BUILDS_IN_PLACE
        return base._build_decode(  # noqa: SLF001 - the contract froze this name
            self,
            block_table_tensor=block_table_tensor,
            seq_lens_device=seq_lens_device.clone() if moved else seq_lens_device,
            max_seq_len=max_seq_len,
            query_start_loc_cpu=query_start_loc_cpu,
            query_start_loc_device=query_start_loc_device,
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens_device=dcp_tot_seq_lens_device,
        )

    builder = derive_builder(base, _build_decode=_build_decode)
    return derive(backend, builder_cls=property(lambda _: builder))
