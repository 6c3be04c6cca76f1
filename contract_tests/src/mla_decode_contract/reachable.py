"""Tensors that an object holds, however deep: what a step may leave behind."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from mla_decode_contract.scene import poison

MOST_DEPTH = 6
LARGEST_CONSTANT = 64


def tensors(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under an object's attributes, with its path, each object once.

    Goes through attributes, dataclass fields, mappings and sequences; not into torch
    modules' classes or functions.
    """
    seen: set[int] = set()
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    while stack:
        path, value, depth = stack.pop()
        if id(value) in seen or depth > MOST_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield path, value
            continue
        for name, child in _children(value):
            stack.append((f"{path}.{name}" if path else name, child, depth + 1))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield str(key), child
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, child in enumerate(value):
            yield str(index), child
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield field.name, getattr(value, field.name, None)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        module = type(value).__module__
        if not module.startswith(("torch", "builtins", "numpy")):
            yield from vars(value).items()


def storages(root: Any) -> dict[int, int]:
    """Bytes of the memory under an object, by address."""
    held = (tensor.untyped_storage() for _, tensor in tensors(root))
    return {storage.data_ptr(): storage.nbytes() for storage in held}


def on_device(root: Any, device: torch.device) -> dict[int, int]:
    """The same, of tensors on one device; what a builder holds on the host is free."""
    found = (tensor for _, tensor in tensors(root) if tensor.device.type == device.type)
    held = (tensor.untyped_storage() for tensor in found)
    return {storage.data_ptr(): storage.nbytes() for storage in held}


def poison_floats(root: Any, spared: Container[int] = ()) -> int:
    """Fill every workspace under an object with NaN; return how many.

    A workspace is a contiguous float tensor of more than `LARGEST_CONSTANT` elements:
    a builder may keep small constants, such as a scale of 1.

    Args:
        root: Mostly a builder.
        spared: Addresses of memory that is the caller's: a builder may keep a view of
            the engine's cache.
    """
    count = 0
    for _, tensor in tensors(root):
        is_large = tensor.is_contiguous() and tensor.numel() > LARGEST_CONSTANT
        if tensor.untyped_storage().data_ptr() in spared:
            continue
        if tensor.is_floating_point() and is_large:
            poison(tensor)
            count += 1
    return count
