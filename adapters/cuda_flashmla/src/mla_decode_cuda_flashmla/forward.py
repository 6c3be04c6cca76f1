"""One call: arguments in the library's layout, its answers in the contract's.

Written for host time: a forward is about forty of these a step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch

from mla_decode.backend import DecodeOutput
from mla_decode.errors import ArgumentError
from mla_decode_cuda_flashmla.limits import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.forward_check import CheckedCall
    from mla_decode_cuda_flashmla.builder import FlashMLAMetadata

_NAN, _MINUS_INF = math.nan, -math.inf


def decode(call: CheckedCall, fill_out: bool) -> DecodeOutput:
    """Run a checked call.

    Args:
        call: Its metadata is this backend's; ``out`` is written only on request.
        fill_out: Whether ``call.out`` is the caller's. Where it is not, the library's
            own output is returned: one copy less.
    """
    metadata = cast("FlashMLAMetadata", call.metadata)
    query = _aligned_query(call.q)
    scale = call.softmax_scale
    if scale < metadata.kernel.min_scale:
        query, scale = _raised_scale(query, scale, metadata.kernel.min_scale)
    cache = _paged_cache(call.kv_cache)
    device = query.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        out, lse = _run(metadata, query, cache, scale, call)
    else:  # the library asks the current device, not the tensors', for its SM count
        with torch.cuda.device(device):
            out, lse = _run(metadata, query, cache, scale, call)
    empty = metadata.empty
    if empty is not None:
        out.masked_fill_(empty, 0.0)
    if fill_out:
        call.out.view(out.shape).copy_(out)
        out = call.out
    else:
        out = out.view(-1, out.shape[2], out.shape[3])
    if call.lse is not None:
        _fill_lse(call.lse, lse, empty)
    return DecodeOutput(out, call.lse)


def _run(
    metadata: FlashMLAMetadata,
    query: Tensor,
    cache: Tensor,
    scale: float,
    call: CheckedCall,
) -> tuple[Tensor, Tensor]:
    rows, heads, width = query.shape
    requests = metadata.num_reqs
    return metadata.kernel.decode(
        query.view(requests, rows // requests, heads, width),
        cache,
        metadata.kernel_table,
        metadata.kernel_lens,
        metadata.schedule(),
        scale,
        metadata.causal,
        (call.q_scale, call.kv_scale),
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


def _paged_cache(cache: Tensor) -> Tensor:
    """The cache with its one KV head as an axis.

    Raises:
        ArgumentError: No page, or a base address that the copy engine cannot take.
    """
    pages, page_size, width = cache.shape
    if not pages or cache.data_ptr() % ALIGNMENT_BYTES:
        raise ArgumentError(
            "FlashMLA cannot read this cache.",
            got=f"{pages} pages at address {cache.data_ptr():#x}",
            allowed=f"1 page or more, at a multiple of {ALIGNMENT_BYTES} bytes",
            fix="allocate the cache apart, or slice it at whole pages",
        )
    if pages == 1:  # its page stride means nothing, and may be one that is refused
        stride = page_size * width
        return cache.as_strided((1, page_size, 1, width), (stride, width, width, 1))
    return cache.unsqueeze(2)


def _fill_lse(target: Tensor, lse: Tensor, empty: Tensor | None) -> None:
    """Transpose [B, H, Q] to [B*Q, H] and give rows without keys -inf: one kernel."""
    requests, heads, query_len = lse.shape
    rows = lse.transpose(1, 2)
    target = target.view(requests, query_len, heads)
    if empty is None:
        torch.nan_to_num(
            rows, nan=_NAN, posinf=_MINUS_INF, neginf=_MINUS_INF, out=target
        )
    else:
        target.copy_(rows)
        target.masked_fill_(empty.view(requests, 1, 1), _MINUS_INF)
