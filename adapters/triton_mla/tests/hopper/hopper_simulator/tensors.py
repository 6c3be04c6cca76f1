"""Global memory: pointers, and descriptors as the copy engine reads them."""

from __future__ import annotations

import types

import torch

from .scalars import Scalar


def flat(tensor):
    """The memory that a tensor spans, as one row of elements."""
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided([1 + sum((n - 1) * s for n, s in spans)], [1])


class Pointer:
    """Elements of a flat tensor, and where this pointer (or block of them) points.

    Args:
        tensor: The elements.
        offset: Of an element, or of a block of them.
        is_late: Whether the kernel before uses the tensor, which may still be running.
    """

    def __init__(self, tensor, offset=0, *, is_late=False):
        self.tensor = tensor
        self.offset = offset
        self.is_late = is_late
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other):
        if isinstance(other, torch.Tensor):
            other = other.long()
        offset = self.offset
        if isinstance(other, int) and isinstance(offset, int):
            return self._at(int(offset) + int(other))
        return self._at(offset + other)

    def _at(self, offset):
        return Pointer(self.tensor, offset, is_late=self.is_late)

    def load(self, mask, other):
        if isinstance(self.offset, torch.Tensor):
            return self._load_block(mask, other)
        if mask is not None and not mask:
            return other
        if not 0 <= self.offset < self.tensor.numel():
            raise IndexError("a load outside of a global tensor")
        value = self.tensor[self.offset].item()
        return value if isinstance(value, float) else Scalar(value)

    def view(self, dtype):
        if self.offset:
            raise NotImplementedError("a cast of a pointer that was moved")
        return Pointer(self.tensor.view(dtype), is_late=self.is_late)

    def unsqueeze(self, axis):
        return self._at(self.offset.unsqueeze(axis))

    def check_inside(self, mask, num_bytes):
        """Raise where memory from these pointers on is not all of the tensor's."""
        first = self.offset[mask]
        stop = first + num_bytes // self.tensor.itemsize
        if first.numel() and not 0 <= first.min() <= stop.max() <= self.tensor.numel():
            raise IndexError("a load outside of a global tensor")

    def _load_block(self, mask, other):
        mask = mask.expand(self.offset.shape)
        self.check_inside(mask, self.tensor.itemsize)
        values = torch.full(self.offset.shape, other, dtype=self.tensor.dtype)
        values[mask] = self.tensor[self.offset[mask]]
        return values

    def store(self, value, mask):
        offset = torch.as_tensor(self.offset)
        value = torch.as_tensor(value, dtype=self.tensor.dtype)
        if mask is not None:
            mask = mask.expand(offset.shape)
            offset, value = offset[mask], value.expand(mask.shape)[mask]
        size = self.tensor.numel()
        if offset.numel() and not 0 <= offset.min() <= offset.max() < size:
            raise IndexError("a store outside of a global tensor")
        self.tensor[offset] = value


class ElementType:
    """The element type of a descriptor."""

    def __init__(self, dtype):
        self.torch = dtype
        self.primitive_bitwidth = dtype.itemsize * 8


class Descriptor:
    """A tensor as the copy engine sees it: boxes, zeros outside of it."""

    def __init__(self, tensor, block):
        self.tensor = tensor
        self.block = block
        self.dtype = ElementType(tensor.dtype)
        self.layout = "descriptor layout"

    def box(self, origin):
        result = torch.zeros(self.block, dtype=self.tensor.dtype)
        source, target = [], []
        for start, size, extent in zip(
            origin, self.block, self.tensor.shape, strict=True
        ):
            low, high = max(start, 0), min(start + size, extent)
            if low >= high:
                return result
            source.append(slice(low, high))
            target.append(slice(low - start, high - start))
        result[tuple(target)] = self.tensor[tuple(source)]
        return result
