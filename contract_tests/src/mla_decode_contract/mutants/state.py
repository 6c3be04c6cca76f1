"""Mutants whose state is wrong: schedules that outlive their step, shared ubatches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from mla_decode_contract.mutants.faulty import Fault, faulty_decode, overwrite
from mla_decode_contract.mutants.mutant import derive, derive_builder

if TYPE_CHECKING:
    from mla_decode.backend import Backend


def stale_schedule(backend: Backend) -> Backend:
    """A builder keeps the lengths of its first batch of a size for all later ones."""
    right = type(backend).forward
    first: WeakKeyDictionary[Any, dict[int, list[int]]] = WeakKeyDictionary()

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        result = right(self, q, kv_cache, metadata, **kwargs)
        kept = first.setdefault(metadata.builder, {})
        lens = kept.setdefault(metadata.num_reqs, metadata.seq_lens.tolist())
        if lens == metadata.seq_lens.tolist():
            return result
        wrong = faulty_decode(
            Fault(), q, kv_cache, metadata, lens=lens, **_scales(kwargs)
        )
        return overwrite(result, *wrong)

    return derive(backend, forward=forward)


def empties_of_the_shape(backend: Backend) -> Backend:
    """A builder takes a batch's empty requests to be those of its first of a size."""
    right = type(backend).forward
    first: WeakKeyDictionary[Any, dict[int, list[bool]]] = WeakKeyDictionary()

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        result = right(self, q, kv_cache, metadata, **kwargs)
        is_empty = [seq_len == 0 for seq_len in metadata.seq_lens.tolist()]
        kept = first.setdefault(metadata.builder, {})
        starts = metadata.query_start_loc.tolist()
        for request, was in enumerate(kept.setdefault(metadata.num_reqs, is_empty)):
            rows = slice(starts[request], starts[request + 1])
            if was and not is_empty[request]:
                result.out[rows] = 0
            elif is_empty[request] and not was:
                result.out[rows] = torch.nan
        return result

    return derive(backend, forward=forward)


def stale_metadata_served(backend: Backend) -> Backend:
    """Metadata of an earlier step is taken for the newest."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        if metadata.builder is not None:
            metadata.generation = metadata.builder.generation
        return right(self, q, kv_cache, metadata, **kwargs)

    return derive(backend, forward=forward)


def ubatch_state_on_class(backend: Backend) -> Backend:
    """The mask and lengths of the last build, whoever made it, are those of all."""
    base: Any = backend.builder_cls
    right = type(backend).forward
    last: dict[str, Any] = {}

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
        last["causal"] = self._decode_causal
        last["lens"] = seq_lens_device.tolist()
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

    builder = derive_builder(base, _build_decode=_build_decode)

    @functools.wraps(right)
    def forward(self: Any, q: Any, kv_cache: Any, metadata: Any, **kwargs: Any) -> Any:
        result = right(self, q, kv_cache, metadata, **kwargs)
        mine = metadata.seq_lens.tolist()
        shared = last["lens"][: len(mine)]
        lens = [*shared, *mine[len(shared) :]]
        if lens == mine and last["causal"] == metadata.causal:
            return result
        wrong = faulty_decode(
            Fault(),
            q,
            kv_cache,
            metadata,
            lens=lens,
            causal=last["causal"],
            **_scales(kwargs),
        )
        return overwrite(result, *wrong)

    return derive(backend, forward=forward, builder_cls=property(lambda _: builder))


def _scales(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        "softmax_scale": kwargs["softmax_scale"],
        "q_scale": kwargs.get("q_scale"),
        "kv_scale": kwargs.get("kv_scale"),
    }
