# mypy: ignore-errors
"""The merge of few pieces: a warp a row, so that nothing crosses warps.

Much of a merge is the way there: the launch, the work table, addresses. As little of it
as can be is left for when the kernel before is over, and a row's pieces are then loaded
in one go.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from mla_decode_triton.hopper.compat import aggregate, barrier
from mla_decode_triton.hopper.rows import LN2, Outputs, share
from mla_decode_triton.hopper.walk import LATENT

_HEADER = gl.constexpr(8)


@aggregate
class Unit:
    """Some columns of some rows of a split request, and the pieces that they are in."""

    index: gl.tensor
    """Columns first, then rows, then splits."""
    split: gl.tensor
    """Of the work table; past its last one, what is read of it is nobody's."""
    request: gl.tensor
    first_part: gl.tensor
    """Where the first piece is."""
    num_pieces: gl.tensor

    @gluon.constexpr_function
    def __init__(self, index, split, request, first_part, num_pieces) -> None:
        self.index = index
        self.split = split
        self.request = request
        self.first_part = first_part
        self.num_pieces = num_pieces


@gluon.jit
def _place_pieces(
    unit,
    start,
    num_rows,
    rows,
    IS_FIRST: gl.constexpr,
    BLOCK_PIECES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Where pieces of rows lie, [rows, pieces], from one on; and which there are."""
    piece = start + gl.arange(0, BLOCK_PIECES, layout=gl.SliceLayout(0, LAYOUT))
    slot = (unit.first_part + piece) * 2
    if IS_FIRST:
        # The first piece of a request has the odd slot of its part, others even ones.
        slot += (piece == 0).to(gl.int32)
    place = gl.expand_dims(slot * num_rows, 0) + gl.expand_dims(rows, 1)
    return place, gl.expand_dims(piece < unit.num_pieces, 0)


@gluon.jit
def _load_pieces(outputs, place, offsets, here):
    """Values of pieces, [rows, pieces, columns], and their log-sum-exps."""
    values = gl.load(
        outputs.partial_out + offsets, mask=gl.expand_dims(here, 2), other=0.0
    )
    # What is after the barrier is used first, so no load waits for the use of another.
    barrier()
    return values, gl.load(outputs.partial_lse + place, mask=here, other=float("-inf"))


@gluon.jit
def _weigh_pieces(values, piece_lse, peak):
    """What pieces add up to under a peak of their rows, and what that is of."""
    safe = gl.where(peak == float("-inf"), 0.0, peak)
    weights = gl.exp2(piece_lse - gl.expand_dims(safe, 1))
    return gl.sum(weights, 1), gl.sum(values * gl.expand_dims(weights, 2), 1), safe


@gluon.jit
def _merge_unit(
    unit,
    outputs,
    num_rows,
    row_blocks,
    NEEDS_LSE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_PIECES: gl.constexpr,
    BLOCK_COLUMNS: gl.constexpr,
    WAITS: gl.constexpr,
):
    """Merge the pieces of a unit.

    WAITS: for the kernel before, as soon as addresses are known.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 1, 32], [gl.num_warps(), 1, 1], [2, 1, 0]
    )
    PIECES: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    ROWS: gl.constexpr = gl.SliceLayout(1, PIECES)
    OUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    BLOCKS: gl.constexpr = LATENT // BLOCK_COLUMNS
    row0 = (unit.index // BLOCKS % row_blocks) * BLOCK_ROWS
    column0 = unit.index % BLOCKS * BLOCK_COLUMNS
    # Rows past the last are the last once more, and are not stored.
    rows = gl.minimum(row0 + gl.arange(0, BLOCK_ROWS, layout=ROWS), num_rows - 1)
    columns = column0 + gl.arange(
        0, BLOCK_COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    )
    columns = gl.expand_dims(gl.expand_dims(columns, 0), 1)
    place, here = _place_pieces(unit, 0, num_rows, rows, True, BLOCK_PIECES, PIECES)
    offsets = gl.expand_dims(place.to(gl.int64) * LATENT, 2) + columns
    if WAITS:
        gdc_wait()
    values, piece_lse = _load_pieces(outputs, place, offsets, here)
    peak = gl.max(piece_lse, 1)
    total, acc, _ = _weigh_pieces(values, piece_lse, peak)
    for start in range(BLOCK_PIECES, unit.num_pieces, BLOCK_PIECES):
        place, here = _place_pieces(
            unit, start, num_rows, rows, False, BLOCK_PIECES, PIECES
        )
        offsets = gl.expand_dims(place.to(gl.int64) * LATENT, 2) + columns
        values, piece_lse = _load_pieces(outputs, place, offsets, here)
        new_peak = gl.maximum(peak, gl.max(piece_lse, 1))
        more, more_acc, safe = _weigh_pieces(values, piece_lse, new_peak)
        decay = gl.exp2(peak - safe)
        total = total * decay + more
        acc = acc * gl.expand_dims(gl.convert_layout(decay, OUT_ROWS), 1) + more_acc
        peak = new_peak
    base = unit.request.to(gl.int64) * num_rows + row0
    merged = acc * gl.expand_dims(gl.convert_layout(share(total, 1.0), OUT_ROWS), 1)
    out_row = gl.arange(0, BLOCK_ROWS, layout=OUT_ROWS)
    out_column = column0 + gl.arange(0, BLOCK_COLUMNS, layout=gl.SliceLayout(0, OUT))
    places = gl.expand_dims(out_row * LATENT, 1) + gl.expand_dims(out_column, 0)
    gl.store(
        outputs.out + base * LATENT + places,
        merged.to(outputs.out.dtype.element_ty),
        mask=gl.expand_dims(row0 + out_row < num_rows, 1),
    )
    if NEEDS_LSE:
        if column0 == 0:
            empty = total == 0.0
            natural = (peak + gl.log2(gl.where(empty, 1.0, total))) * LN2
            row = gl.arange(0, BLOCK_ROWS, layout=ROWS)
            gl.store(
                outputs.lse + base + row,
                gl.where(empty, float("-inf"), natural),
                mask=row0 + row < num_rows,
            )


@gluon.jit
def _find_unit(
    table, index, row_blocks, BLOCK_PARTS: gl.constexpr, BLOCKS: gl.constexpr
):
    """A unit, by the entries of its split."""
    split = index // BLOCKS // row_blocks
    entry = table + _HEADER + 4 * BLOCK_PARTS + split * 4
    request = gl.load(entry)
    first_part = gl.load(entry + 1)
    num_pieces = gl.load(entry + 6) - gl.load(entry + 2) + 1
    return Unit(index, split, request, first_part, num_pieces)


@gluon.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lse"])
def merge_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    table,
    num_rows,
    NEEDS_LSE: gl.constexpr,
    BLOCK_PARTS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_PIECES: gl.constexpr,
    BLOCK_COLUMNS: gl.constexpr,
    LOOPS: gl.constexpr,
):
    """Merge every split request of the work table.

    Grid: a program a unit, or more; with LOOPS any number of programs, which take turns:
    where there is seldom a unit, few programs are over sooner.

    Tensors are those of `merge.merge_kernel`. A unit is BLOCK_ROWS rows of a request,
    one a warp, by BLOCK_COLUMNS columns. More than BLOCK_PIECES pieces take several
    rounds. The launch overlaps the end of the kernel before it, whose writes are waited
    for here.
    """
    BLOCKS: gl.constexpr = LATENT // BLOCK_COLUMNS
    row_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    outputs = Outputs(out, lse, partial_out, partial_lse)
    index = gl.program_id(0)
    if LOOPS:
        num_units = gl.load(table) * row_blocks * BLOCKS
        gdc_wait()
        for turn in range(index, num_units, gl.num_programs(0)):
            unit = _find_unit(table, turn, row_blocks, BLOCK_PARTS, BLOCKS)
            _merge_unit(
                *(unit, outputs, num_rows, row_blocks),
                *(NEEDS_LSE, BLOCK_ROWS, BLOCK_PIECES, BLOCK_COLUMNS, False),
            )
    else:
        # The table is older than the kernel before: it is read while that one ends,
        # and all at once, the entries of no request too.
        num_splits = gl.load(table)
        unit = _find_unit(table, index, row_blocks, BLOCK_PARTS, BLOCKS)
        if unit.split < num_splits:
            _merge_unit(
                *(unit, outputs, num_rows, row_blocks),
                *(NEEDS_LSE, BLOCK_ROWS, BLOCK_PIECES, BLOCK_COLUMNS, True),
            )
        else:
            gdc_wait()
