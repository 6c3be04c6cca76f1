"""What differs between the releases of Gluon that the Hopper kernel is compiled on.

Gluon is experimental: names move between releases. Kernels take the names of this
module, which are those of the newest release; 3.6 is the oldest one supported.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import (
    _unwrap_if_constexpr,
    builtin,
)
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core as _core

aggregate: Any = getattr(gluon, "aggregate", None) or _core._aggregate  # noqa: SLF001 - 3.6 has no public name
"""Make a class a bundle of device values (3.6: a private name)."""

OLDEST = (3, 6)
"""The oldest Triton release that the kernel is compiled on."""

async_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Bulk copy of a box of a tensor descriptor into shared memory (3.6: another name)."""

barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait for all threads of the current partition (3.6: another name)."""


@builtin
def reinterpret(
    memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None
) -> Any:
    """View shared memory under another shape and layout (3.6: a private method)."""
    return _semantic.memdesc_reinterpret(
        memory,
        _unwrap_if_constexpr(dtype),
        [_unwrap_if_constexpr(size) for size in _unwrap_if_constexpr(shape)],
        _unwrap_if_constexpr(layout),
    )


@functools.cache
def triton_release() -> tuple[int, int]:
    """Major and minor number of the Triton that is imported."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
