# mypy: ignore-errors
"""What a consumer does with rows: which keys they see, softmax, and the results.

Scores are [rows, tokens] or, with swapped operands, [tokens, rows]; ROW_AXIS says which,
and LAYOUT is theirs. What is kept for each row has the layout of a slice.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_decode_triton.hopper.compat import aggregate
from mla_decode_triton.hopper.walk import LATENT, TILE

LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1.0e30)
"""A peak before any: far enough from the lowest float that a scale leaves it finite."""
NO_TOKEN = gl.constexpr(2147483647)
OCTETS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)
"""64 rows by 256 columns, each warp's rows as an accumulator's: eight columns a thread,
which are stored at once, and 64 bytes of a row by four threads, which are whole sectors.
"""


@aggregate
class Outputs:
    """Where results go: rows of requests, and pieces of those that are split."""

    out: gl.tensor
    lse: gl.tensor
    partial_out: gl.tensor
    partial_lse: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, lse, partial_out, partial_lse) -> None:
        self.out = out
        self.lse = lse
        self.partial_out = partial_out
        self.partial_lse = partial_lse


@gluon.jit
def first_hidden(rows, seq_len, num_heads, query_len, CAUSAL: gl.constexpr):
    """The first token that each row does not see, and the least of them."""
    visible = rows * 0 + seq_len
    least_visible = seq_len
    if CAUSAL:
        visible = visible - (query_len - 1 - rows // num_heads)
        least_visible = seq_len - (query_len - 1)
    return visible, least_visible


@gluon.jit
def tile_tokens(token0, seq_len, PIECE: gl.constexpr, LAYOUT: gl.constexpr):
    """The token that each row of a loaded tile holds; `NO_TOKEN` for rows of zeros."""
    slot = gl.arange(0, TILE, layout=LAYOUT)
    in_piece = slot % PIECE
    piece0 = token0 + (slot - in_piece)
    shift = PIECE - gl.minimum(gl.maximum(seq_len - piece0, 0), PIECE)
    return gl.where(in_piece < shift, NO_TOKEN, piece0 + in_piece - shift)


@gluon.jit
def hide_tokens(
    scores,
    visible,
    least_visible,
    token0,
    seq_len,
    PIECE: gl.constexpr,
    ROW_AXIS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Scores with -inf where a row does not see a token; most tiles are seen whole."""
    if token0 + TILE > least_visible:
        tokens = tile_tokens(token0, seq_len, PIECE, gl.SliceLayout(ROW_AXIS, LAYOUT))
        seen = gl.expand_dims(tokens, ROW_AXIS) < gl.expand_dims(visible, 1 - ROW_AXIS)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def raise_peak(scores, peak, scale_log2, ROW_AXIS: gl.constexpr):
    """The peak of an online softmax so far, and what sums are to be scaled by."""
    new_peak = gl.maximum(peak, gl.max(scores, 1 - ROW_AXIS))
    return new_peak, gl.exp2((peak - new_peak) * scale_log2)


@gluon.jit
def weigh(scores, peak, scale_log2, ROW_AXIS: gl.constexpr):
    """The weights of scores under their peak."""
    shift = gl.expand_dims(peak * scale_log2, 1 - ROW_AXIS)
    return gl.exp2(scores * scale_log2 - shift)


@gluon.jit
def place_item(part, req, first, last, num_tiles):
    """First row of a request, first row of its piece's slot, and whether it is split."""
    base = req.to(gl.int64) * part.num_rows
    is_split = (first > 0) | (last < num_tiles)
    slot = part.index * 2 + gl.where(first == 0, 1, 0)
    return base, slot.to(gl.int64) * part.num_rows, is_split


@gluon.jit
def share(total, value_scale):
    """What accumulated values are to be multiplied by; 0 for rows without a key."""
    empty = total == 0.0
    return gl.where(empty, 0.0, value_scale / gl.where(empty, 1.0, total))


@gluon.jit
def store_lse(
    outputs,
    peak,
    total,
    scale_log2,
    rows,
    num_rows,
    base,
    slot_base,
    is_split,
    NEEDS_LSE: gl.constexpr,
):
    """Store the log-sum-exp of an item's rows: log2 of a piece, natural of a request."""
    empty = total == 0.0
    lse_log2 = peak * scale_log2 + gl.log2(gl.where(empty, 1.0, total))
    lse_log2 = gl.where(empty, float("-inf"), lse_log2)
    if is_split:
        gl.store(outputs.partial_lse + slot_base + rows, lse_log2, mask=rows < num_rows)
    elif NEEDS_LSE:
        gl.store(outputs.lse + base + rows, lse_log2 * LN2, mask=rows < num_rows)


@gluon.jit
def store_half(
    outputs,
    acc,
    factor,
    part,
    base,
    slot_base,
    is_split,
    COLUMN: gl.constexpr,
    ROWS: gl.constexpr,
    ROW_AXIS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store 256 columns of an item times a factor of their rows, from a given one on."""
    values = acc * gl.expand_dims(factor, 1 - ROW_AXIS)
    store_columns(
        outputs, values, part, base, slot_base, is_split, COLUMN, ROWS, ROW_AXIS, LAYOUT
    )


@gluon.jit
def store_columns(
    outputs,
    values,
    part,
    base,
    slot_base,
    is_split,
    COLUMN: gl.constexpr,
    ROWS: gl.constexpr,
    ROW_AXIS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store some columns of an item, from a given one on."""
    if is_split:
        _store(
            outputs.partial_out, values, part, slot_base, COLUMN, ROWS, ROW_AXIS, LAYOUT
        )
    else:
        rounded = values.to(outputs.out.dtype.element_ty)
        if ROW_AXIS == 0:
            octets = gl.convert_layout(rounded, OCTETS)
            _store(outputs.out, octets, part, base, COLUMN, ROWS, ROW_AXIS, OCTETS)
        else:
            _store(outputs.out, rounded, part, base, COLUMN, ROWS, ROW_AXIS, LAYOUT)


@gluon.jit
def _store(
    pointer,
    values,
    part,
    base,
    COLUMN: gl.constexpr,
    ROWS: gl.constexpr,
    ROW_AXIS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store what is in a layout at the rows from a first one on, those that exist."""
    rows = part.row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1 - ROW_AXIS, LAYOUT))
    COUNT: gl.constexpr = values.shape[1 - ROW_AXIS]
    columns = COLUMN + gl.arange(0, COUNT, layout=gl.SliceLayout(ROW_AXIS, LAYOUT))
    columns = gl.expand_dims(columns, ROW_AXIS)
    offsets = gl.expand_dims(base + rows, 1 - ROW_AXIS) * LATENT + columns
    inside = gl.expand_dims(rows < part.num_rows, 1 - ROW_AXIS)
    gl.store(pointer + offsets, values, mask=inside)
