"""Layers like an earlier one: launched by what that one found out.

The layers of a model differ in their addresses, and core compares the rest of their tensors
at every call. So what a layer is launched with is put together once for a geometry; from
then on a layer looks its addresses up and hands them to the driver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_decode_triton.hopper.boxes import hold
from mla_decode_triton.hopper.compat import hooks_are_set
from mla_decode_triton.hopper.direct import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from mla_decode.forward_check import CheckedCall
    from mla_decode_triton.hopper.boxes import Boxed
    from mla_decode_triton.hopper.direct import Directly, Variant

LOG2E = math.log2(math.e)
_ANYWHERE = {"attention": ("table", "seq_lens", "lse", "kv_scale"), "merge": ("lse",)}
"""Parameters whose addresses are not looked at: a kernel may demand nothing of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """The launches of a layer, for one batch size and tensors of the same types."""

    grid: tuple[int, int, int]
    attention: Variant
    is_boxed: bool
    """Whether the cache is read in boxes."""
    merge_grid: tuple[int, int, int]
    merge: Variant


class Launched(NamedTuple):
    """What a layer was launched with."""

    layer: Layer
    boxes: tuple[Boxed, ...]
    """Of the query's two parts, and of the cache where it is read in boxes."""
    numbers: tuple[int, ...]
    """Of the attention kernel, after the scale."""


class Known:
    """The launches of layers that differ in addresses alone.

    It holds addresses and what was encoded of them, and keeps no tensor.

    Args:
        layer: Grids.
        attention: The launch of the attention kernel.
        merge: The launch of the merge.
        numbers: Of the attention kernel, after the scale.
        addresses: Of the workspace, in the order of `HopperStep.addresses`.
        num_rows: Of a request.
    """

    __slots__ = (
        "_attention",
        "_caches",
        "_layer",
        "_merge",
        "_pieces",
        "_queries",
        "_rest",
        "_rest_of_merge",
        "_schedule_at",
    )

    def __init__(
        self,
        layer: Layer,
        attention: Directly,
        merge: Directly,
        numbers: tuple[int, ...],
        addresses: tuple[int, int, int, int],
        num_rows: int,
    ) -> None:
        self._layer, self._attention, self._merge = layer, attention, merge
        self._schedule_at, _, *pieces = addresses
        self._pieces: tuple[int, ...] = tuple(pieces)
        self._rest = *numbers, *attention.values
        self._rest_of_merge = self._schedule_at, num_rows, *merge.values
        self._queries: dict[Hashable, tuple[Any, ...]] = {}
        self._caches: dict[int, tuple[Any, ...]] = {}

    @classmethod
    def of(
        cls, launched: Launched, addresses: tuple[int, int, int, int], num_rows: int
    ) -> Known | None:
        """Know layers like one that was launched; None: they have no free launches."""
        layer = launched.layer
        attention = layer.attention.directly(*_ANYWHERE["attention"])
        merge = layer.merge.directly(*_ANYWHERE["merge"])
        if attention is None or merge is None:
            return None
        return cls(layer, attention, merge, launched.numbers, addresses, num_rows)

    def hold(self, call: CheckedCall, boxes: tuple[Boxed, ...]) -> None:
        """Hold what the driver takes for a call's query and cache, if it took them yet."""
        encoded = [box.encoded for box in boxes if box.encoded is not None]
        if len(encoded) < len(boxes):
            return
        latent, rope, *cache = encoded
        address = call.kv_cache.data_ptr()
        hold(self._queries, _query_key(call.q, call.q_rope), (*latent, *rope))
        hold(self._caches, address, cache[0] if cache else (address,))

    def launch(self, call: CheckedCall, reads: tuple[int, int]) -> bool:
        """Launch a layer on the current stream, or find that its addresses are new.

        Args:
            call: Like the one that was launched.
            reads: Addresses of the step's table and lengths.

        Returns:
            Whether it was launched.
        """
        query = self._queries.get(_query_key(call.q, call.q_rope))
        cache = self._caches.get(call.kv_cache.data_ptr())
        out_at = call.out.data_ptr()
        if query is None or cache is None or out_at % ALIGNMENT or hooks_are_set():
            return False
        pieces, lse, scale = self._pieces, call.lse, call.kv_scale
        lse_at = pieces[1] if lse is None else lse.data_ptr()
        scales = () if scale is None else (scale.data_ptr(),)
        layer, factor = self._layer, call.softmax_scale * LOG2E
        self._attention.launch(
            layer.grid,
            (
                *(*query, *cache, *reads, self._schedule_at, out_at, lse_at, *pieces),
                *(*scales, factor, *self._rest),
            ),
        )
        self._merge.launch(
            layer.merge_grid, (*pieces, out_at, lse_at, *self._rest_of_merge)
        )
        return True


def _query_key(q: Tensor, rope: Tensor | None) -> Hashable:
    address: int = q.data_ptr()
    return address if rope is None else (address, rope.data_ptr())
