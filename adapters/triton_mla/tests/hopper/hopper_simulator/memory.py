"""Shared memory: elements as the swizzle groups them, and views of them."""

from __future__ import annotations

import torch

from .races import Access, SimulationError


class Shared:
    """A view of shared memory; matrices are stored in groups of columns.

    The copy engine fills groups of 64 columns; as pairs of a type of half the size
    those are 32.
    """

    def __init__(self, world, elements, history, offset, shape, group):
        self.world = world
        self.elements = elements
        self.history = history
        self.offset = offset
        self.shape = list(shape)
        self.group = group
        self.dtype = elements.dtype

    def view(self, offset, shape):
        return Shared(
            self.world, self.elements, self.history, offset, shape, self.group
        )

    def reinterpret(self, dtype, shape):
        dtype = getattr(dtype, "torch", dtype)
        old, new = self.dtype.itemsize, dtype.itemsize
        if torch.Size(shape).numel() * new != torch.Size(self.shape).numel() * old:
            raise ValueError(f"{self.shape} viewed as {shape}")
        return Shared(
            self.world,
            self.elements.view(dtype),
            self.history,
            self.offset * old // new,
            shape,
            self.group * old // new,
        )

    def index(self, index):
        size = torch.Size(self.shape[1:]).numel()
        if not 0 <= index < self.shape[0]:
            raise SimulationError(f"index {index} of shared memory {self.shape}")
        return self.view(self.offset + int(index) * size, self.shape[1:])

    def permute(self, order):
        return Transposed(self, order)

    def access(self, what, *, is_plain):
        size = self.dtype.itemsize
        start = self.offset * size
        stop = start + torch.Size(self.shape).numel() * size
        agent = self.world.turns.running
        over = agent.step() if is_plain else None
        return Access(start, stop, what, agent, is_plain, over)

    def get(self):
        """The values, unjudged."""
        cells = self._cells()
        if len(self.shape) == 1:
            return cells.clone()
        rows, columns = self.shape[-2:]
        width = min(columns, self.group)
        grouped = cells.view(-1, columns // width, rows, width)
        return grouped.transpose(1, 2).reshape(self.shape)

    def put(self, value):
        """Change the values, unjudged."""
        if len(self.shape) > 1:
            rows, columns = self.shape[-2:]
            width = min(columns, self.group)
            value = value.reshape(-1, rows, columns // width, width).transpose(1, 2)
        self._cells().copy_(value.reshape(-1))

    def load(self, _layout):
        self.history.read(self.access("load", is_plain=True))
        return self.get().clone()

    def store(self, value):
        if list(value.shape) != self.shape:
            raise ValueError(f"a store of {list(value.shape)} into {self.shape}")
        access = self.access("store", is_plain=True)
        self.history.write(access)
        access.agent.unfenced.append(access)
        self.put(value.to(self.dtype))

    def operand(self):
        """The values for a matrix product, and the access until it is waited for."""
        access = self.access("product", is_plain=False)
        self.history.read(access)
        return self.get(), access

    def _cells(self):
        return self.elements[self.offset : self.offset + torch.Size(self.shape).numel()]


class Transposed:
    """A transposed operand."""

    def __init__(self, memory, order):
        if tuple(order) != (1, 0):
            raise NotImplementedError(order)
        self.memory = memory

    def load(self, layout):
        return self.memory.load(layout).T

    def operand(self):
        value, access = self.memory.operand()
        return value.T, access
