# mypy: ignore-errors
"""A kernel that widens codes and does nothing else."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_decode_triton.hopper.widening import widened


@gluon.jit
def widen_codes(codes, values):
    """All 256 codes, for one warp."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    index = gl.arange(0, 256, layout=layout)
    dtype: gl.constexpr = values.dtype.element_ty
    gl.store(values + index, widened(gl.load(codes + index), dtype))
