"""One call: arguments in the library's layout, its answers in the contract's.

Two ways lead to the kernel. The first call of a layer, and any in an unusual layout, is
checked in full by core. A call whose tensors have the geometry of the step and a cache
that was checked before takes the short way: the same checks, as comparisons.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mla_decode.backend import BackendBase, DecodeOutput
from mla_decode_cuda_flashmla.builder import FlashMLAMetadata, FlashMLAMetadataBuilder
from mla_decode_cuda_flashmla.caches import paged
from mla_decode_cuda_flashmla.capture import EAGER
from mla_decode_cuda_flashmla.finishing import in_order, lse_by_torch
from mla_decode_cuda_flashmla.limits import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from mla_decode.forward_check import CheckedCall
    from mla_decode.metadata import DecodeMetadata

    Query = Tensor | tuple[Tensor, Tensor]

_INF = math.inf


class FlashMLAForward(BackendBase):
    """The backend's call; what it serves and costs is said by `FlashMLABackend`."""

    builder_cls = FlashMLAMetadataBuilder

    def forward(
        self,
        q: Query,
        kv_cache: Tensor,
        metadata: DecodeMetadata,
        *,
        softmax_scale: float,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> DecodeOutput:
        """Attend each query token; see `BackendBase.forward`.

        Without ``out`` the library's own output is returned and nothing is copied. The
        short way is why this method is written twice: what core's checks cost beyond it
        is a third of what the adapter may add to a call of the library.
        """
        if (  # attributes compared, no tensor made: this is most of a step's host time
            type(metadata) is FlashMLAMetadata
            and type(q) is Tensor
            and q_scale is None
            and kv_scale is None
            and q.shape == metadata.q_shape
            and q.is_contiguous()
            and not q.data_ptr() % ALIGNMENT_BYTES
        ):
            builder = metadata.require_current()
            if (
                type(builder) is FlashMLAMetadataBuilder
                and q.dtype is builder.q_dtype
                and q.get_device() == builder.device_number
                and type(softmax_scale) is float
                and builder.min_scale <= softmax_scale < _INF
                and (out is None or _fits_out(out, metadata, builder))
                and (lse is None or _fits_lse(lse, metadata, builder))
                and (cache := builder.checked_caches.find(kv_cache)) is not None
                and not builder.is_elsewhere()
            ):
                call = metadata.calls.get(EAGER)
                if call is None or builder.is_capturing():
                    call = metadata.call()
                found, found_lse = call(
                    q=q.view(metadata.kernel_q_shape),
                    k_cache=cache,
                    softmax_scale=softmax_scale,
                )
                if not builder.needs_lse:
                    found = found.view(metadata.out_shape)
                    return DecodeOutput(
                        out.copy_(found) if out is not None else found, None
                    )
                finisher = builder.finisher
                if finisher is None or not finisher.takes(found, found_lse, out):
                    found = found.view(metadata.out_shape)
                    return DecodeOutput(
                        out.copy_(found) if out is not None else found,
                        lse_by_torch(found_lse, lse),
                    )
                if lse is None:
                    lse = in_order(found_lse)
                finisher.finish(found, found_lse, out, lse)
                return DecodeOutput(
                    out if out is not None else found.view(metadata.out_shape), lse
                )
        return super().forward(
            q,
            kv_cache,
            metadata,
            softmax_scale=softmax_scale,
            q_scale=q_scale,
            kv_scale=kv_scale,
            out=out,
            lse=lse,
        )

    def _forward(self, call: CheckedCall) -> None:
        metadata = cast("FlashMLAMetadata", call.metadata)
        builder = cast("FlashMLAMetadataBuilder", metadata.builder)
        query, scale = _aligned_query(call.q), call.softmax_scale
        if scale < builder.min_scale:
            query, scale = _raised_scale(query, scale, builder.min_scale)
        cache = paged(call.kv_cache)
        if builder.is_elsewhere():
            with torch.cuda.device(builder.device):
                out, lse = _run(metadata, query, cache, scale, call)
        else:
            out, lse = _run(metadata, query, cache, scale, call)
        empty = metadata.empty
        if empty is None and builder.validate == "host":
            builder.checked_caches.add(call.kv_cache)
        elif empty is not None:
            out.masked_fill_(empty, 0.0)
        out = out.view(*metadata.out_shape)
        if call.callers_out is None:
            call.out = out
        else:
            call.callers_out.copy_(out)
        if builder.needs_lse:
            found = lse_by_torch(lse, call.callers_lse)
            if empty is not None:
                by_request = found.view(metadata.num_reqs, -1, 1)
                by_request.masked_fill_(empty.view(-1, 1, 1), -_INF)
            call.lse = found


def _fits_out(
    out: Tensor, metadata: FlashMLAMetadata, builder: FlashMLAMetadataBuilder
) -> bool:
    return (
        type(out) is Tensor
        and out.shape == metadata.out_shape
        and out.dtype is builder.out_dtype
        and out.get_device() == builder.device_number
        and out.is_contiguous()
    )


def _fits_lse(
    lse: Tensor, metadata: FlashMLAMetadata, builder: FlashMLAMetadataBuilder
) -> bool:
    return (
        type(lse) is Tensor
        and builder.needs_lse
        and lse.shape == metadata.out_shape[:2]
        and lse.dtype is torch.float32
        and lse.get_device() == builder.device_number
        and lse.is_contiguous()
    )


def _run(
    metadata: FlashMLAMetadata,
    query: Tensor,
    cache: Tensor,
    scale: float,
    call: CheckedCall,
) -> tuple[Tensor, Tensor]:
    scales = {}
    if call.q_scale is not None and call.kv_scale is not None:
        scales = {"descale_q": call.q_scale, "descale_k": call.kv_scale}
    return metadata.call()(
        q=query.view(*metadata.kernel_q_shape),
        k_cache=cache,
        softmax_scale=scale,
        **scales,
    )


def _aligned_query(query: Tensor) -> Tensor:
    """The query where the copy engine can read it: contiguous, 16-byte aligned."""
    if query.is_contiguous() and not query.data_ptr() % ALIGNMENT_BYTES:
        return query
    return query.clone(memory_format=torch.contiguous_format)


def _raised_scale(query: Tensor, scale: float, least: float) -> tuple[Tensor, float]:
    """The same product q.k*scale with a scale that the kernel can mask under."""
    factor = 2.0 ** math.ceil(math.log2(least) - math.log2(scale))
    return query * (1.0 / factor), scale * factor
