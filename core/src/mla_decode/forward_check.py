"""What the host can check of a forward call, once a build and tensor geometry."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode.errors import ArgumentError, BatchError, StaleMetadataError
from mla_decode.metadata import DecodeMetadata
from mla_decode.problem import LATENT_WIDTH, ROPE_WIDTH, ROW_WIDTH

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.builder import MLADecodeMetadataBuilder

    Query = Tensor | tuple[Tensor, Tensor]


class CheckedCall:
    """A forward call whose arguments keep the contract.

    The adapter fills `out` and `lse`, every row. Where the caller passed none, core
    allocates them when they are first read; an adapter whose library brings its own
    assigns them instead, and nothing is allocated or copied.
    """

    __slots__ = (
        "_lse",
        "_out",
        "callers_lse",
        "callers_out",
        "kv_cache",
        "kv_scale",
        "metadata",
        "q",
        "q_rope",
        "q_scale",
        "softmax_scale",
    )

    def __init__(  # by position: it is made once a layer
        self,
        q: Tensor,
        q_rope: Tensor | None,
        kv_cache: Tensor,
        metadata: DecodeMetadata,
        softmax_scale: float,
        q_scale: Tensor | None,
        kv_scale: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        self.q: Tensor = q
        """[T, H, 576]; where the backend takes pairs and got one, its nope part."""
        self.q_rope: Tensor | None = q_rope
        """[T, H, 64] where the backend takes pairs and got one."""
        self.kv_cache: Tensor = kv_cache
        """[P, S, 576] in the problem's dtype; uint8 is already viewed as fp8."""
        self.metadata: DecodeMetadata = metadata
        self.softmax_scale: float = softmax_scale
        self.q_scale: Tensor | None = q_scale
        self.kv_scale: Tensor | None = kv_scale
        self._out: Tensor | None = out
        self.callers_out: Tensor | None = out
        """The caller's own out, contiguous, or None."""
        self._lse: Tensor | None = lse
        self.callers_lse: Tensor | None = lse
        """The caller's own lse, contiguous, or None."""

    @property
    def builder(self) -> MLADecodeMetadataBuilder:
        """The builder that made the metadata."""
        return cast("MLADecodeMetadataBuilder", self.metadata.builder)

    @property
    def out(self) -> Tensor:
        """[T, H, 512], contiguous; not initialised where core allocated it."""
        if self._out is None:
            builder = self.builder
            self._out = torch.empty(  # sizes apart: torch reads a tuple more slowly
                self.metadata.num_decode_tokens,
                builder.problem.num_q_heads,
                LATENT_WIDTH,
                dtype=builder.out_dtype,
                device=builder.device,
            )
        return self._out

    @out.setter
    def out(self, out: Tensor) -> None:
        self._out = out

    @property
    def lse(self) -> Tensor | None:
        """float32 [T, H], contiguous; None unless the problem needs it."""
        if self._lse is None and self.builder.problem.needs_lse:
            builder = self.builder
            self._lse = torch.empty(
                self.metadata.num_decode_tokens,
                builder.problem.num_q_heads,
                dtype=torch.float32,
                device=builder.device,
            )
        return self._lse

    @lse.setter
    def lse(self, lse: Tensor | None) -> None:
        self._lse = lse


def check_forward(
    builder_cls: type[MLADecodeMetadataBuilder],
    q: Query,
    kv_cache: Tensor,
    metadata: DecodeMetadata,
    softmax_scale: float,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    *,
    keep_pair: bool,
) -> CheckedCall:
    """Check a call and give it the form that adapters' kernels take.

    Geometry is checked once a build and set of shapes, strides, dtypes and devices;
    later layers of the step pay a comparison.

    Raises:
        ArgumentError: A tensor or scale breaks the contract.
        StaleMetadataError: Metadata of another step, builder or geometry.
    """
    if not isinstance(metadata, DecodeMetadata):
        raise StaleMetadataError(
            "The metadata is nothing that a build returned.",
            got=type(metadata).__name__,
            allowed="the metadata that the builder's last build returned",
            fix="call build for this step and pass what it returns to every layer",
        )
    builder = metadata.require_current()
    if type(softmax_scale) is not float or not 0.0 < softmax_scale < math.inf:
        _check_scale_value(softmax_scale)
    geometry = (
        builder_cls,
        tuple(map(_geometry, q)) if isinstance(q, tuple) else _geometry(q),
        _geometry(kv_cache),
        None if q_scale is None else _geometry(q_scale),
        None if kv_scale is None else _geometry(kv_scale),
        None if out is None else _geometry(out),
        None if lse is None else _geometry(lse),
    )
    if geometry != metadata.geometry:
        if not isinstance(builder, builder_cls):
            raise StaleMetadataError(
                "The metadata was built by another backend's builder.",
                got=type(builder).__name__,
                allowed=builder_cls.__name__,
                fix="pass metadata to the backend whose builder made it",
            )
        _check_query(q, builder, metadata)
        _check_cache(kv_cache, builder, metadata)
        _check_scale("q_scale", q_scale, builder, needed=builder.problem.q_dtype)
        _check_scale("kv_scale", kv_scale, builder, needed=builder.problem.kv_dtype)
        _check_outputs(out, lse, builder, metadata)
        metadata.geometry = geometry
    if builder.validate == "device":
        _check_scale_values(q_scale=q_scale, kv_scale=kv_scale)
    rope = None
    if isinstance(q, tuple):
        q, rope = q if keep_pair else (builder.join_query(*q), None)
    if kv_cache.dtype is torch.uint8:
        kv_cache = kv_cache.view(torch_dtype("fp8", builder.device_info))
    return CheckedCall(
        q, rope, kv_cache, metadata, softmax_scale, q_scale, kv_scale, out, lse
    )


def _geometry(tensor: Any) -> object:
    if isinstance(tensor, torch.Tensor):
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return type(tensor)


def _check_scale_value(softmax_scale: Any) -> None:
    if (
        not isinstance(softmax_scale, float)
        or not math.isfinite(softmax_scale)
        or softmax_scale <= 0.0
    ):
        raise ArgumentError(
            "softmax_scale is not a positive finite float.",
            got=repr(softmax_scale),
            allowed="a Python float > 0",
            fix="pass the model's scale: (un-absorbed head width)**-0.5, times its "
            "YaRN factor; 192**-0.5 for DeepSeek-V3, never 576**-0.5",
        )


def _check_query(
    q: Any, builder: MLADecodeMetadataBuilder, metadata: DecodeMetadata
) -> None:
    if isinstance(q, tuple):
        if len(q) != 2:
            raise _stale("q", q, "the pair (nope, rope)")
        _check_query_part("q nope", q[0], LATENT_WIDTH, builder, metadata)
        _check_query_part("q rope", q[1], ROPE_WIDTH, builder, metadata)
    else:
        _check_query_part("q", q, ROW_WIDTH, builder, metadata)


def _check_query_part(
    name: str,
    q: Any,
    width: int,
    builder: MLADecodeMetadataBuilder,
    metadata: DecodeMetadata,
) -> None:
    problem = builder.problem
    shape = (metadata.num_decode_tokens, problem.num_q_heads, width)
    dtype = torch_dtype(problem.q_dtype, builder.device_info)
    if (
        not isinstance(q, torch.Tensor)
        or q.shape != shape
        or q.dtype != dtype
        or q.device != builder.device
    ):
        raise _stale(name, q, f"{dtype} {list(shape)} on {builder.device}")
    if q.stride(-1) != 1:
        raise ArgumentError(
            f"{name}'s last axis is not contiguous.",
            got=f"strides {q.stride()}",
            allowed="stride 1 on the last axis",
            fix="call .contiguous() on it",
        )


def _check_cache(
    cache: Any, builder: MLADecodeMetadataBuilder, metadata: DecodeMetadata
) -> None:
    problem = builder.problem
    dtypes = {torch_dtype(problem.kv_dtype, builder.device_info)}
    if problem.kv_dtype == "fp8":
        dtypes.add(torch.uint8)
    inner = (problem.page_size, ROW_WIDTH)
    if (
        not isinstance(cache, torch.Tensor)
        or cache.dim() != 3
        or cache.shape[1:] != inner
        or cache.dtype not in dtypes
        or cache.device != builder.device
    ):
        names = " or ".join(sorted(map(str, dtypes)))
        raise _stale(
            "kv_cache", cache, f"{names} [pages, {inner[0]}, 576] on {builder.device}"
        )
    strides = cache.stride()
    paged = cache.shape[0] > 1 and strides[0] != problem.page_stride
    if paged or strides[2] != 1 or (inner[0] > 1 and strides[1] != ROW_WIDTH):
        raise _stale(
            "kv_cache", cache, f"strides ({problem.page_stride}, {ROW_WIDTH}, 1)"
        )
    if metadata.last_page >= cache.shape[0]:
        raise BatchError(
            "A used slot of the block table lies past the cache.",
            got=f"page {metadata.last_page}",
            allowed=f"0..{cache.shape[0] - 1}",
            fix="pass the cache that the table was made for",
        )


def _check_scale(
    name: str, scale: Any, builder: MLADecodeMetadataBuilder, *, needed: str
) -> None:
    if scale is None and needed != "fp8":
        return
    if (
        needed != "fp8"
        or not isinstance(scale, torch.Tensor)
        or scale.dtype != torch.float32
        or scale.shape != (1,)
        or scale.device != builder.device
    ):
        is_tensor = isinstance(scale, torch.Tensor)
        raise ArgumentError(
            f"{name} does not fit the problem's dtype.",
            got=_form(scale) if is_tensor else repr(scale),
            allowed=(
                f"float32 [1] on {builder.device}"
                if needed == "fp8"
                else f"None, since the tensor is {needed}"
            ),
            fix=f"pass {name} as a device tensor exactly where its tensor is fp8: "
            "it is never read on the host",
        )


def _check_scale_values(**scales: Tensor | None) -> None:
    """Read the fp8 scales of a call; under ``validate="device"`` only: it waits."""
    for name, scale in scales.items():
        value = 1.0 if scale is None else float(scale)
        if not math.isfinite(value) or value <= 0.0:
            raise ArgumentError(
                f"{name} is not a positive finite number.",
                got=repr(value),
                allowed="a number > 0: what a stored 1.0 stands for",
                fix=f"pass the {name} that the tensor was quantised with; 1.0 for none",
            )


def _check_outputs(
    out: Any, lse: Any, builder: MLADecodeMetadataBuilder, metadata: DecodeMetadata
) -> None:
    problem = builder.problem
    rows = (metadata.num_decode_tokens, problem.num_q_heads)
    if out is not None:
        dtype = torch_dtype(problem.out_dtype, builder.device_info)
        _check_output("out", out, (*rows, LATENT_WIDTH), dtype, builder.device)
    if lse is not None:
        if not problem.needs_lse:
            raise ArgumentError(
                "lse was passed but the problem does not ask for it.",
                got=_form(lse),
                allowed="None",
                fix="set needs_lse=True in the DecodeProblem, or leave lse out",
            )
        _check_output("lse", lse, rows, torch.float32, builder.device)


def _check_output(
    name: str,
    tensor: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.shape != shape
        or tensor.dtype != dtype
        or tensor.device != device
        or not tensor.is_contiguous()
    ):
        raise ArgumentError(
            f"{name} cannot be filled in place.",
            got=_form(tensor),
            allowed=f"{dtype} {list(shape)} on {device}, contiguous",
            fix=f"pass a contiguous {name} of this shape, or leave it out",
        )


def _stale(name: str, value: Any, allowed: str) -> StaleMetadataError:
    return StaleMetadataError(
        f"{name} has another geometry than the problem that the metadata is bound to.",
        got=_form(value),
        allowed=allowed,
        fix="build metadata for this batch and problem, or pass tensors of it",
    )


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__}"
    return (
        f"{value.dtype} {list(value.shape)} strides {value.stride()} on {value.device}"
    )
