# mypy: ignore-errors
"""Named barriers: some partitions give, one takes, and no thread speaks for others.

An arrival at a barrier in shared memory is one thread's on behalf of its partition, so
Triton wraps it in two barriers of the whole partition. At a named one each warp arrives
by itself, with one instruction, and goes on; whoever takes waits for all of them. There
is no parity either: a barrier is as new when all have come. So nobody may come to the
next meeting before the one before is over, and each meeting that is given is to be
taken, the last ones of a program too.

A barrier has a number for each of two stages. Triton takes numbers from 0 on, one for
each partition and one to start them; `test_compiles` holds that these are others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WEIGHTS = gl.constexpr(8)
"""The scorer gives the multiplier weights and decays."""
RIGHT_IS_FREE = gl.constexpr(10)
"""The multiplier gives back the right half of a stage, with its rope part."""
LEFT_IS_FREE = gl.constexpr(12)
"""The scorer gives back the left half."""

WARPGROUP = gl.constexpr(128)
BETWEEN_CONSUMERS = gl.constexpr(256)
"""Threads that meet at a barrier, all of both sides."""


@gluon.jit
def give(number, THREADS: gl.constexpr):
    """Arrive, each warp by itself, and go on."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2;\nmov.b32 $0, 0;",
        "=r,r,r,~{memory}",
        [number, THREADS],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def take(number, THREADS: gl.constexpr):
    """Arrive and wait for all the others, of this partition too."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2;\nmov.b32 $0, 0;",
        "=r,r,r,~{memory}",
        [number, THREADS],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def give_both(number, THREADS: gl.constexpr):
    """Give what two stages have: at the beginning, when all room is free."""
    give(number, THREADS)
    give(number + 1, THREADS)


@gluon.jit
def take_both(number, THREADS: gl.constexpr):
    """Take what two stages have: at the end, so that no meeting stays open."""
    take(number, THREADS)
    take(number + 1, THREADS)
