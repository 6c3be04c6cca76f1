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
from mla_decode_cuda_flashmla.capture import EAGER, UNCAPTURABLE
from mla_decode_cuda_flashmla.finishing import lse_by_torch
from mla_decode_cuda_flashmla.limits import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from mla_decode.forward_check import CheckedCall
    from mla_decode.metadata import DecodeMetadata
    from mla_decode_cuda_flashmla.batches import BatchShape

    Query = Tensor | tuple[Tensor, Tensor]

_INF = math.inf
_new = tuple.__new__
"""Makes a named tuple without a frame of Python's: half the time."""


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
            and type(softmax_scale) is float
            and type(builder := metadata.builder) is FlashMLAMetadataBuilder
            and builder.generation == metadata.generation
            and metadata.keeps_tensors()
            and q.shape == (shape := metadata.shape).q
            and q.is_contiguous()
            and not q.data_ptr() % ALIGNMENT_BYTES
            and q.dtype is builder.q_dtype
            and q.get_device() == builder.device_number
            and builder.min_scale <= softmax_scale < _INF
            and ((out is None and lse is None) or _fit(out, lse, shape, builder))
            and (cache := builder.find_cache(kv_cache)) is not None
            and not (builder.guards_device and builder.is_elsewhere())
        ):
            stream = builder.stream_of(builder.device_number)
            call = metadata.calls.get(EAGER)
            if call is None or (stream != UNCAPTURABLE and builder.is_capturing()):
                call = metadata.call()
            found, found_lse = call(
                q=q.view_as(shape.kernel_q_like),
                k_cache=cache,
                softmax_scale=softmax_scale,
            )
            finish = metadata.finish
            out_to = 0 if out is None else out.data_ptr()
            if (
                finish is None  # no LSE, or no kernel
                or not (finish.takes_answers or finish.takes(found, found_lse))
                or out_to % ALIGNMENT_BYTES
            ):
                found = found.view_as(shape.out_like)
                if out is not None:
                    found = out.copy_(found)
                if builder.needs_lse:
                    lse = lse_by_torch(found_lse, lse)
                return _new(DecodeOutput, (found, lse))
            lse_from = lse_to = found_lse.data_ptr()
            if lse is not None:
                lse_to = lse.data_ptr()
            elif shape.lse_like is not None:
                lse = found_lse.view_as(shape.lse_like)
            else:
                lse = found_lse.as_strided(shape.lse, shape.lse_strides)
            if out is None:
                finish.mark(stream, lse_from, lse_to, 0, 0)
                out = found.view_as(shape.out_like)
            else:
                finish.copy(stream, lse_from, lse_to, found.data_ptr(), out_to)
            return _new(DecodeOutput, (out, lse))
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
        out = out.view_as(metadata.shape.out_like)
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


def _fit(
    out: Tensor | None,
    lse: Tensor | None,
    shape: BatchShape,
    builder: FlashMLAMetadataBuilder,
) -> bool:
    """Whether the outputs that the caller passed can be filled."""
    return (
        out is None
        or (
            type(out) is Tensor
            and out.shape == shape.out
            and out.dtype is builder.out_dtype
            and out.get_device() == builder.device_number
            and out.is_contiguous()
        )
    ) and (
        lse is None
        or (
            type(lse) is Tensor
            and builder.needs_lse
            and lse.shape == shape.lse
            and lse.dtype is torch.float32
            and lse.get_device() == builder.device_number
            and lse.is_contiguous()
        )
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
        q=query.view_as(metadata.shape.kernel_q_like),
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
