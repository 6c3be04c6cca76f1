# mypy: ignore-errors
"""fp8 (e4m3fn) codes in registers to the query's type, exactly, four at a time.

bf16: a code's exponent and mantissa, where bf16 has its own, are the code's value times
2**-120. So a byte is spread over 16 bits with its sign, shifted by 4, rid of all but the
sign's last copy, and multiplied by 2**120: eight instructions for four codes. Codes
without an exponent are subnormal bf16 numbers on the way, which `mul.bf16x2` honours.
fp16: one conversion instruction for two codes.

The codes of NaN (0x7f, 0xff) become +-480 in bf16 and NaN in fp16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TO_BF16 = gl.constexpr("""
{
.reg .b32 low, high, scale;
mov.b32 scale, 0x7b807b80;
prmt.b32 low, $2, 0, 0x9180;
prmt.b32 high, $2, 0, 0xb3a2;
shl.b32 low, low, 4;
shl.b32 high, high, 4;
and.b32 low, low, 0x87f087f0;
and.b32 high, high, 0x87f087f0;
mul.bf16x2 $0, low, scale;
mul.bf16x2 $1, high, scale;
}
""")

TO_FP16 = gl.constexpr("""
{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}
""")

TO_LOW_BF16 = gl.constexpr("""
{
.reg .b32 low, high;
prmt.b32 low, $2, 0, 0x9180;
prmt.b32 high, $2, 0, 0xb3a2;
shl.b32 low, low, 4;
shl.b32 high, high, 4;
and.b32 $0, low, 0x87f087f0;
and.b32 $1, high, 0x87f087f0;
}
""")

FIRST_TO_LOW_BF16 = gl.constexpr("""
{
.reg .b32 spread;
prmt.b32 spread, $1, 0, 0xa280;
shl.b32 spread, spread, 4;
and.b32 $0, spread, 0x87f087f0;
}
""")

SECOND_TO_LOW_BF16 = gl.constexpr("""
{
.reg .b32 spread;
prmt.b32 spread, $1, 0, 0xb391;
shl.b32 spread, spread, 4;
and.b32 $0, spread, 0x87f087f0;
}
""")

UNIT = gl.constexpr(2.0**-120)
"""What values are times that are left as they are before the product above."""


@gluon.jit
def widened(codes, dtype: gl.constexpr):
    """Values of e4m3 codes as bf16 or fp16, in the layout of the codes.

    Every thread must hold a multiple of four codes.
    """
    if dtype == gl.bfloat16:
        values = gl.inline_asm_elementwise(
            TO_BF16, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    else:
        values = gl.inline_asm_elementwise(
            TO_FP16, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4
        )
    return values


@gluon.jit
def widened_low(codes):
    """As `widened`, to bf16, but 2**-120 times the values, which saves their product."""
    return gl.inline_asm_elementwise(
        TO_LOW_BF16, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def widened_one(pairs, SECOND: gl.constexpr):
    """As `widened_low`, the codes in the low bytes of int16, or those in the high ones.

    Every thread must hold a multiple of two pairs.
    """
    ASSEMBLY: gl.constexpr = SECOND_TO_LOW_BF16 if SECOND else FIRST_TO_LOW_BF16
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,r", [pairs], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def lifted(weights):
    """Weights, at most 2**7, as what is left by 2**-120 is to be multiplied by, bf16."""
    return (weights * (1.0 / UNIT)).to(gl.bfloat16)
