"""What the matrix unit multiplies: fp8 widened exactly, queries within float16's range."""

import triton
import triton.language as tl

# tl.max is a compiled function, which interpreted kernels cannot call.
from triton.language.standard import _elementwise_max


@triton.jit
def _widen_fp8(x):
    """Widen e4m3fn to bfloat16, exactly, four numbers at a time.

    Moves the seven bits of exponent and mantissa to where bfloat16 has its low exponent
    bits, which leaves 2**120 to multiply by; subnormals come out right.

    Declared impure because the compiler moves what is pure past the change of layout,
    and would then gather single bytes for each matrix operand.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 lo, hi, lo_mag, hi_mag, two_120, minus_0;
        mov.b32 two_120, 0x7b807b80;
        mov.b32 minus_0, 0x80008000;
        prmt.b32 lo, 0, $2, 0x5040;
        prmt.b32 hi, 0, $2, 0x7060;
        shr.b32 lo_mag, lo, 4;
        shr.b32 hi_mag, hi, 4;
        and.b32 lo_mag, lo_mag, 0x07f007f0;
        and.b32 hi_mag, hi_mag, 0x07f007f0;
        and.b32 lo, lo, 0x80008000;
        and.b32 hi, hi, 0x80008000;
        or.b32 lo, lo, lo_mag;
        or.b32 hi, hi, hi_mag;
        fma.rn.bf16x2 $0, lo, two_120, minus_0;
        fma.rn.bf16x2 $1, hi, two_120, minus_0;
        }
        """,
        "=r,=r,r",
        [x],
        dtype=tl.bfloat16,
        is_pure=False,
        pack=4,
    )


@triton.jit
def unpair(pairs, UPCAST: tl.constexpr):
    """Widen the even and the odd columns of e4m3fn numbers read as pairs, exactly.

    To float16. What is pure may move past a change of layout: pairs are 16 bits wide,
    as the numbers that they become, so they reach the matrix unit's registers by its
    own loads, and nothing wide is ever stored.
    """
    if UPCAST:
        even = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        odd = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        even = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 both;
            .reg .b16 low, high;
            prmt.b32 both, $1, 0, 0x4420;
            mov.b32 {low, high}, both;
            cvt.rn.f16x2.e4m3x2 $0, low;
            }
            """,
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
        odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 both;
            .reg .b16 low, high;
            prmt.b32 both, $1, 0, 0x4431;
            mov.b32 {low, high}, both;
            cvt.rn.f16x2.e4m3x2 $0, low;
            }
            """,
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return even, odd


@triton.jit
def split_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Even and odd columns."""
    return tl.split(tl.reshape(x, [ROWS, COLUMNS // 2, 2]))


@triton.jit
def row_exponents(q_latent, q_rope):
    """The power of two at or below each row's largest magnitude; 1 for a row of zeros.

    Rows divided by it lie within float16's range, and what of bfloat16's precision
    float16 then lacks is 2**-24 of the largest.
    """
    latent_peak = tl.reduce(tl.abs(q_latent.to(tl.float32)), 1, _elementwise_max)
    rope_peak = tl.reduce(tl.abs(q_rope.to(tl.float32)), 1, _elementwise_max)
    bits = tl.maximum(latent_peak, rope_peak).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def as_operand(
    x, DTYPE: tl.constexpr, WIDEN_IN_PTX: tl.constexpr, UPCAST: tl.constexpr
):
    """Give a matrix operand its dtype; float32 where dots are interpreted."""
    if UPCAST:
        x = x.to(tl.float32)
    elif WIDEN_IN_PTX:
        x = _widen_fp8(x).to(DTYPE)
    else:
        x = x.to(DTYPE)
    return x


@triton.jit
def multiply(a, b, UPCAST: tl.constexpr):
    """A product in float32.

    Interpreted it is added up in float64: a matrix product of float32 on a CPU may round
    a row by where it stands among the others, which no GPU's does.
    """
    if UPCAST:
        product = tl.dot(a.to(tl.float64), b.to(tl.float64)).to(tl.float32)
    else:
        product = tl.dot(a, b)
    return product


@triton.jit
def multiply_add(a, b, acc, UPCAST: tl.constexpr):
    """`multiply` and add to a float32 accumulator."""
    if UPCAST:
        acc += tl.dot(a.to(tl.float64), b.to(tl.float64)).to(tl.float32)
    else:
        acc = tl.dot(a, b, acc)
    return acc
