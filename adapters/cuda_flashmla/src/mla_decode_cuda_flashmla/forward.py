"""One call: arguments in the library's layout, its answers in the contract's.

Two ways lead to the kernel. The first call of a step, of a layer, or in an unusual layout
is checked in full by core. A call whose tensors have the geometry of the step and a cache
that was checked before takes the short way: the same checks, as comparisons.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch

from mla_decode.backend import DecodeOutput
from mla_decode_cuda_flashmla.builder import FlashMLAMetadata, FlashMLAMetadataBuilder
from mla_decode_cuda_flashmla.caches import paged
from mla_decode_cuda_flashmla.capture import EAGER
from mla_decode_cuda_flashmla.limits import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.forward_check import CheckedCall
    from mla_decode.metadata import DecodeMetadata

_NAN, _INF = math.nan, math.inf


def decode_known(
    q: Tensor | tuple[Tensor, Tensor],
    kv_cache: Tensor,
    metadata: DecodeMetadata,
    softmax_scale: float,
    out: Tensor | None,
    lse: Tensor | None,
) -> DecodeOutput | None:
    """Run a call of known geometry; None for any other, which core then checks.

    Reads attributes and compares them: no tensor is made before the kernel's own.
    """
    if type(metadata) is not FlashMLAMetadata or type(q) is not torch.Tensor:
        return None
    builder = metadata.builder
    if type(builder) is not FlashMLAMetadataBuilder:
        return None
    if (
        kv_cache not in builder.checked_caches
        or metadata.generation != builder.generation
        or q.shape != metadata.q_shape
        or q.dtype is not builder.q_dtype
        or q.get_device() != builder.device_number
        or not q.is_contiguous()
        or q.data_ptr() % ALIGNMENT_BYTES
        or type(softmax_scale) is not float
        or not builder.min_scale <= softmax_scale < _INF
    ):
        return None
    if out is not None and not _fits(out, metadata.out_shape, builder):
        return None
    if lse is not None and not (
        builder.needs_lse and _fits_lse(lse, metadata.out_shape[:2], builder)
    ):
        return None
    if builder.guards_device and builder.device_number != torch.cuda.current_device():
        return None
    call = metadata.calls.get(EAGER)
    if call is None or builder.is_capturing():
        call = metadata.call()
    found, found_lse = call(
        q=q.view(*metadata.kernel_q_shape),
        k_cache=kv_cache.unsqueeze(2),
        softmax_scale=softmax_scale,
    )
    found = found.view(*metadata.out_shape)
    if out is not None:
        found = out.copy_(found)
    return DecodeOutput(found, _lse(found_lse, lse) if builder.needs_lse else None)


def _fits(
    out: Tensor, shape: tuple[int, int, int], builder: FlashMLAMetadataBuilder
) -> bool:
    return (
        type(out) is torch.Tensor
        and out.shape == shape
        and out.dtype is builder.out_dtype
        and out.get_device() == builder.device_number
        and out.is_contiguous()
    )


def _fits_lse(
    lse: Tensor, shape: tuple[int, int], builder: FlashMLAMetadataBuilder
) -> bool:
    return (
        type(lse) is torch.Tensor
        and lse.shape == shape
        and lse.dtype is torch.float32
        and lse.get_device() == builder.device_number
        and lse.is_contiguous()
    )


def decode(call: CheckedCall, fill_out: bool) -> DecodeOutput:
    """Run a checked call.

    Args:
        call: Its metadata is this backend's; ``out`` is written only on request.
        fill_out: Whether ``call.out`` is the caller's. Where it is not, the library's
            own output is returned: one copy less.
    """
    metadata = cast("FlashMLAMetadata", call.metadata)
    builder = cast("FlashMLAMetadataBuilder", metadata.builder)
    query, scale = _aligned_query(call.q), call.softmax_scale
    if scale < metadata.kernel.min_scale:
        query, scale = _raised_scale(query, scale, metadata.kernel.min_scale)
    cache = paged(call.kv_cache)
    device = query.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        out, lse = _run(metadata, query, cache, scale, call)
    else:  # the library asks the current device, not the tensors', for its SM count
        with torch.cuda.device(device):
            out, lse = _run(metadata, query, cache, scale, call)
    empty = metadata.empty
    if empty is None and builder.validate == "host":
        builder.checked_caches.add(call.kv_cache)
    elif empty is not None:
        out.masked_fill_(empty, 0.0)
    out = out.view(*metadata.out_shape)
    if fill_out:
        out = call.out.copy_(out)
    if call.lse is None:
        return DecodeOutput(out, None)
    found = _lse(lse, call.lse)
    if empty is not None:
        by_request = found.view(metadata.num_reqs, -1, 1)
        by_request.masked_fill_(empty.view(-1, 1, 1), -_INF)
    return DecodeOutput(out, found)


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


def _lse(lse: Tensor, target: Tensor | None) -> Tensor:
    """The library's [B, H, Q] as [B*Q, H], -inf for rows without keys: one kernel."""
    requests, heads, query_len = lse.shape
    if target is None and query_len == 1:  # already in order, and nobody else's
        return torch.nan_to_num_(lse.view(requests, heads), _NAN, -_INF, -_INF)
    if target is None:
        target = lse.new_empty((requests * query_len, heads))
    torch.nan_to_num(
        lse.transpose(1, 2),
        _NAN,
        -_INF,
        -_INF,
        out=target.view(requests, query_len, heads),
    )
    return target
