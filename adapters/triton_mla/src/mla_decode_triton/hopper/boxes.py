"""Tensors as the copy engine reads them: an address, strides, and boxes of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_decode.errors import ArgumentError
from mla_decode.problem import LATENT_WIDTH, ROPE_WIDTH

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch
    from torch import Tensor

_COPY_BYTES = 16
"""What the copy engine wants addresses and strides to be multiples of."""
_BOX_COLUMNS = 64
_LONGEST_BOX = 64
MOST_HELD = 256
"""Caches, and queries, whose boxes a step holds: the layers of a model, several times."""
_K = TypeVar("_K")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxForm:
    """What a compiled kernel knows of a tensor that it reads in boxes.

    One object for each form (`box_form`): it is compared and hashed by identity.
    """

    dtype: torch.dtype
    block_shape: list[int]
    layout: gl.NVMMASharedLayout


@cache
def box_form(dtype: torch.dtype, rows: int) -> BoxForm:
    """Boxes of some rows by 64 columns, in lines of 64 elements, swizzled."""
    bits = dtype.itemsize * 8
    return BoxForm(
        dtype=dtype,
        block_shape=[1, rows, _BOX_COLUMNS],
        layout=gl.NVMMASharedLayout(bits * 8, bits, 3),
    )


class Boxed:
    """A tensor that is read in boxes; of the tensor it holds the address alone.

    It has what Triton's launcher reads of a descriptor, and is also its own base.
    Whatever keeps it keeps no memory alive.

    Args:
        form: Type and boxes.
        address: A multiple of 16.
        shape: Of three axes; what lies outside of it is read as zeros.
        strides: In elements; the last one is 1, the others are multiples of 16 bytes.
    """

    __slots__ = ("address", "encoded", "form", "shape", "strides")

    padding = "zero"
    round_f32_to_tf32 = False
    mode = "tiled"

    def __init__(  # by position: three of them are made a layer
        self,
        form: BoxForm,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> None:
        self.form = form
        self.address = address
        self.shape = shape
        self.strides = strides
        self.encoded: tuple[Any, ...] | None = None
        """What the driver's launch takes for it, from the first such launch on. It is
        the same for all kernels: they read a form in one way."""

    @property
    def base(self) -> Boxed:
        """What to ask for the address and the type."""
        return self

    def data_ptr(self) -> int:
        """Its address."""
        return self.address

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.form.dtype

    @property
    def block_shape(self) -> list[int]:
        """Of a box."""
        return self.form.block_shape

    @property
    def layout(self) -> gl.NVMMASharedLayout:
        """Of a box in shared memory."""
        return self.form.layout

    def described(self) -> Any:
        """Give Triton's own descriptor, which its front door takes and checks."""
        form = self.form
        return TensorDescriptor(
            self, list(self.shape), list(self.strides), form.block_shape, form.layout
        )


def box_cache(cache: Tensor) -> Boxed:
    """Read a cache [pages, page_size, 576] in boxes of a page's rows, 64 at most.

    Raises:
        ArgumentError: As `page_stride`.
    """
    shape = cache.shape
    form = box_form(cache.dtype, min(shape[1], _LONGEST_BOX))
    page = page_stride(cache) * _COPY_BYTES // cache.element_size()
    return Boxed(form, cache.data_ptr(), shape, (page, *cache.stride()[1:]))


def page_stride(cache: Tensor) -> int:
    """Page stride of a cache, in units of 16 bytes; that of a single page is its size.

    Raises:
        ArgumentError: The address or the stride is no multiple of them, or there is no
            page at all.
    """
    pages, page_size, width = cache.shape
    stride: int = cache.stride(0) if pages > 1 else page_size * width
    stride *= cache.element_size()
    if not pages or (cache.data_ptr() | stride) % _COPY_BYTES:
        raise ArgumentError(
            "The Hopper kernel reads a cache 16 bytes at a time.",
            got=f"{pages} pages {stride} bytes apart at address {cache.data_ptr():#x}",
            allowed="one page or more, address and stride multiples of 16 bytes",
            fix="align the cache and pad its pages, or set "
            "MLA_DECODE_TRITON_KERNEL=portable",
        )
    return stride // _COPY_BYTES


def box_queries(
    latent: Tensor, rope: Tensor | None, query_len: int, box_rows: int
) -> tuple[Boxed, Boxed]:
    """Read queries as `try_box_queries` does.

    Raises:
        ArgumentError: They cannot be read so.
    """
    queries = try_box_queries(latent, rope, query_len, box_rows)
    if queries is None:
        parts = (latent,) if rope is None else (latent, rope)
        raise ArgumentError(
            "The Hopper kernel reads the rows of a query at one common stride.",
            got=" and ".join(
                f"strides {part.stride()} at address {part.data_ptr():#x}"
                for part in parts
            ),
            allowed="contiguous rows, token stride = H * head stride, all of them "
            "multiples of 16 bytes",
            fix="join the query into a contiguous buffer first",
        )
    return queries


def try_box_queries(  # by position: once a layer
    latent: Tensor, rope: Tensor | None, query_len: int, box_rows: int
) -> tuple[Boxed, Boxed] | None:
    """Read queries as [requests, Q * H, width]: rows past the last are zeros.

    Args:
        latent: [T, H, 512], or [T, H, 576] where there is no `rope`.
        rope: [T, H, 64]; None: the last 64 columns of `latent`, of which no view is made.
        query_len: Q; T is a multiple of it.
        box_rows: Of a box.

    Returns:
        Latent and rope part; None if the copy engine cannot read one of them: its rows
        do not lie at one common stride, or not at multiples of 16 bytes.
    """
    num_tokens, num_heads, _ = latent.shape
    placed = _place_rows(latent, query_len, num_heads)
    if placed is None:
        return None
    address, strides = placed
    num_reqs, num_rows = num_tokens // query_len, query_len * num_heads
    form = box_form(latent.dtype, box_rows)
    boxed = Boxed(form, address, (num_reqs, num_rows, LATENT_WIDTH), strides)
    if rope is None:
        address += LATENT_WIDTH * latent.element_size()
    else:
        placed = _place_rows(rope, query_len, num_heads)
        if placed is None:
            return None
        address, strides = placed
    return boxed, Boxed(form, address, (num_reqs, num_rows, ROPE_WIDTH), strides)


def _place_rows(
    q: Tensor, query_len: int, num_heads: int
) -> tuple[int, tuple[int, int, int]] | None:
    """Address, and strides of requests, rows and columns; None if not regular."""
    token, head, column = q.stride()
    address: int = q.data_ptr()
    bits = address | (token | head) * q.element_size()
    is_spaced = query_len == 1 or token == head * num_heads
    if column != 1 or not is_spaced or bits % _COPY_BYTES:
        return None
    return address, (token * query_len, head, 1)


class HeldBoxes:
    """The boxes that a step read last, by addresses and geometry: no tensor is kept.

    They depend on nothing else, so that memory that is used anew is read rightly; and
    encoding one for the driver takes longer on the host than a launch.

    Args:
        query_len: Q.
        box_rows: Of a query's box.
    """

    def __init__(self, query_len: int, box_rows: int) -> None:
        self._query_len = query_len
        self._box_rows = box_rows
        self._queries: dict[Hashable, tuple[Boxed, Boxed]] = {}
        self._caches: dict[Hashable, Boxed] = {}

    def queries(
        self, latent: Tensor, rope: Tensor | None
    ) -> tuple[Boxed, Boxed] | None:
        """Read queries as `try_box_queries` does."""
        key: Hashable = (
            *(latent.data_ptr(), latent.dtype, latent.shape, latent.stride()),
            rope if rope is None else (rope.data_ptr(), rope.stride()),
        )
        held = self._queries.get(key)
        if held is None:
            held = try_box_queries(latent, rope, self._query_len, self._box_rows)
            if held is not None:
                hold(self._queries, key, held)
        return held

    def cache(self, cache: Tensor) -> Boxed:
        """Read a cache as `box_cache` does."""
        key = cache.data_ptr(), cache.dtype, cache.shape, cache.stride()
        held = self._caches.get(key)
        if held is None:
            held = box_cache(cache)
            hold(self._caches, key, held)
        return held


def hold(held: dict[_K, _T], key: _K, value: _T) -> None:
    """Hold a value, and no more than so many: then all are let go."""
    if len(held) >= MOST_HELD and key not in held:
        held.clear()
    held[key] = value
