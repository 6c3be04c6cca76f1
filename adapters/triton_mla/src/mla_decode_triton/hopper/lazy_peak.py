# mypy: ignore-errors
"""The online softmax of many rows, whose peaks rise only where they must.

Any number near the greatest score of a row serves as its peak: weights, their sum and
what is accumulated are all times the same power of two, and the log-sum-exp adds it back.
So a peak is left alone until a score of a warp's rows is more than 2**8 times as heavy,
which after the first tiles is seldom. Weights are then at most 2**8, which float16 holds
as exactly as 1, and 2**8 times as many fit into the float32 of a sum as a request has.

What keeps a peak costs a thread its own maxima and one vote. What raises it costs
shuffles and 128 products for the accumulator.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_decode_triton.hopper.votes import any_positive

SLACK = gl.constexpr(8.0)
"""By how much, in log2, a score may be above its peak."""
QUADS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[
            [0, 0, 0, 1],
            [8, 0, 0, 0],
            [0, 1, 0, 0],
            [0, 2, 0, 0],
            [0, 4, 0, 0],
        ],
        lane_bases=[
            [0, 0, 1, 0],
            [0, 0, 2, 0],
            [1, 0, 0, 0],
            [2, 0, 0, 0],
            [4, 0, 0, 0],
        ],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 8, 4, 2],
    )
)
"""Where scores lie, with an axis for the four threads that share a row."""
QUAD = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(3, QUADS)))
"""[rows, 4]: what each thread makes of its columns of two rows."""
QUAD_ROW = gl.constexpr(gl.SliceLayout(1, QUAD))


@gluon.jit
def _quads(x):
    """[64, 64] as [64, 8, 4, 2], in the registers where it is."""
    return gl.convert_layout(gl.reshape(x, [64, 8, 4, 2]), QUADS)


@gluon.jit
def no_sums():
    """Sums of nothing, as of `thread_sums`."""
    return gl.full([64, 4], 0.0, gl.float32, layout=QUAD)


@gluon.jit
def thread_sums(weights):
    """What each thread sums of its rows, [64, 4]: added up across threads once an item."""
    return gl.sum(gl.sum(_quads(weights), 3), 1)


@gluon.jit
def raise_heavy(
    scores,
    peak,
    sums,
    acc,
    scale_log2,
    SCORES: gl.constexpr,
    ACC: gl.constexpr,
):
    """Raise peaks of rows whose warp has a score far above one; scale what hangs on them.

    Returns peaks, the decays that everything else of these rows is to be scaled by (1
    where a peak was left alone), sums and accumulator.
    """
    PER_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    most = gl.max(gl.max(_quads(scores), 3), 1)
    limit = gl.convert_layout(peak * scale_log2 + SLACK, QUAD_ROW)
    decay = gl.full([64], 1.0, gl.float32, layout=PER_ROW)
    if any_positive(most * scale_log2 - gl.expand_dims(limit, 1)):
        raised = gl.maximum(peak, gl.convert_layout(gl.max(most, 1), PER_ROW))
        decay = gl.exp2((peak - raised) * scale_log2)
        peak = raised
        sums = sums * gl.expand_dims(gl.convert_layout(decay, QUAD_ROW), 1)
        of_acc = gl.convert_layout(decay, gl.SliceLayout(1, ACC))
        acc = acc * gl.expand_dims(of_acc, 1)
    return peak, decay, sums, acc
