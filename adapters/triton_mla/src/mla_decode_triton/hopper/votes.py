# mypy: ignore-errors
"""What a warp agrees on, so that it may branch without the other warps.

A scalar of Triton is the same in all threads of a partition, and what makes one of a
tensor is a reduction through shared memory with barriers of the partition. A vote is one
instruction. Its result is a scalar all the same, which differs between warps. That is
sound where the branch that it decides holds nothing that warps do together: no barrier,
no shared memory (so no change of layout but within a warp), no product. Threads of a
warp always agree, so what is there may shuffle. `test_compiles` reads the listing of
both branches for it.

Gluon has no such scalar. So the vote leaves its result in a register of the kernel,
outside of Triton's sight, and the scalar is read from there by the next statement;
statements with effects keep their order. A register that is not declared, or twice, is
an error of the assembler; that a vote sees a thread's values at once (and not one vote
overwrites another) is the reason for `pack` and is tested by counting votes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

DECLARE = gl.constexpr(".reg .b32 mla_vote;\nmov.b32 $0, 0;")
VOTE = gl.constexpr("""{
    .reg .f32 most;
    .reg .pred some;
    max.f32 most, $2, $3;
    setp.gt.f32 some, most, 0f00000000;
    vote.sync.any.pred some, some, -1;
    selp.b32 mla_vote, 1, 0, some;
    mov.f32 $0, most;
    mov.f32 $1, most;
}""")
READ = gl.constexpr("mov.b32 $0, mla_vote;")


@gluon.jit
def declare_vote():
    """Make the register of votes: once, at the beginning of a kernel."""
    gl.inline_asm_elementwise(DECLARE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def any_positive(values):
    """Whether any of a warp's values, two a thread, is positive: each warp by itself.

    A NaN is not. The branch may hold nothing that warps do together.
    """
    gl.inline_asm_elementwise(
        VOTE, "=f,=f,f,f", [values], dtype=gl.float32, is_pure=False, pack=2
    )
    vote = gl.inline_asm_elementwise(
        READ, "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return vote != 0
