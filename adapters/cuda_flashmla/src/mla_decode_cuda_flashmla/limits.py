"""What FlashMLA's dense decode can take, and what it does past each limit.

Past most of these the library ends the process, reads what is not its own, or overflows
a 32-bit offset: each is a refusal here, before a tensor exists. Numbers come from the
library's sources (deepseek-ai/FlashMLA 9241ae3) unless a line says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode.capability import (
    Capability,
    CapabilityRow,
    Feature,
    Source,
    Support,
    describe,
)
from mla_decode.mask import Mask
from mla_decode.problem import LATENT_WIDTH
from mla_decode.refusal import Refusal, RefusalCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode.problem import DecodeProblem

ARCH = "sm_90"
PAGE_SIZE = 64
TILE_ROWS = 64
"""Query rows of one tile; a request's Q*H rows are padded to a multiple of it."""
H200_SMS = 132
"""Streaming multiprocessors of an H100 SXM or H200: what an assumed device has."""
MAX_ROWS = TILE_ROWS * H200_SMS
"""Rows of one request at which every tile still has a multiprocessor (8448)."""
SCHEDULER_MAX_REQS = 11622
"""The scheduler keeps 5*B+1 ints in shared memory, of which a block has 227 KiB."""
FIXED_SCHEDULER_MAX_REQS = 4095
"""The older scheduler and the fp8 one hold fixed arrays of 4096 and need one spare."""
FP8_MAX_QUERY_LEN = 65
"""The fp8 kernel masks the last two pages of a split: a causal block must fit there."""
FP8_LSE_ERROR = 0.25
"""Bound of an fp8 LSE's error over the scale, as seen on an H200 (0.16): the card adds
fp8 products to about 14 bits. The contract wants an LSE to a few units of float32."""
ALIGNMENT_BYTES = 16
"""Of the cache's base, of its page stride, and of q: the copy engine's granularity."""
MIN_SCALE = 2.0**-10
"""The bf16 kernel hides a key by scoring it -1e33 against a running maximum that starts
at -1e30: below a scale of 7e-4 a split whose keys are all hidden would count them."""
MAX_ACCUMULATOR_ELEMENTS = 2**31
"""Split results are addressed with 32-bit offsets."""

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
NATIVE_OUT = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
"""The output dtype that the kernel of each query dtype writes."""
_BF16_KERNELS = (
    "get_mla_metadata_kernel",
    "sm90::flash_fwd_splitkv_mla_kernel",
    "flash_fwd_mla_combine_kernel",
)
KERNELS = {
    "bf16": _BF16_KERNELS,
    "fp16": _BF16_KERNELS,
    "fp8": (
        "get_mla_metadata_kernel",
        "flash::flash_fwd_splitkv_mla_kernel",
        "flash::flash_fwd_splitkv_mla_combine_kernel",
    ),
}
"""Device kernels of one call, as a profiler prints them, by query dtype."""

CAPABILITY = Capability(
    rows=(
        CapabilityRow(
            arch=ARCH,
            dtypes=frozenset({("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8")}),
            out_dtypes=frozenset({"bf16", "fp16"}),
            page_sizes=frozenset({PAGE_SIZE}),
            num_q_heads=range(1, MAX_ROWS + 1),
            query_lens={Mask.CAUSAL: range(1, MAX_ROWS + 1)},
            features={
                Feature.LSE: Support.YES,
                Feature.DCP: Support.YES,
                Feature.GRAPHS: Support.YES,
                Feature.PAGE_STRIDE: Support.YES,
            },
            source=Source.PROFILE,
            max_num_reqs=SCHEDULER_MAX_REQS,
        ),
    )
)


def num_sm_parts(rows: int, num_sms: int) -> int:
    """Work lists of one call: the multiprocessors shared out over the row tiles."""
    return max(num_sms // -(-rows // TILE_ROWS), 1)


def limit_refusals(
    problem: DecodeProblem, *, num_sms: int, max_num_reqs: int
) -> Iterator[Refusal]:
    """Reasons that a capability row cannot express: products of a problem's fields.

    Args:
        problem: What the layer group asks.
        num_sms: Multiprocessors of the device.
        max_num_reqs: Most requests that the library's scheduler for this dtype plans.
    """
    yield from _out_dtype(problem)
    if problem.q_dtype == "fp8" and problem.needs_lse:
        yield Refusal(
            code=RefusalCode.LSE,
            message="The fp8 kernel's LSE is not that of the scores",
            got="needs_lse=True with an fp8 query",
            allowed="fp8 without LSE; LSE with bf16 and fp16",
            fix="use bf16 where ranks merge by LSE, or another backend",
        )
    yield from _rows(problem, num_sms)
    yield from _requests(problem, num_sms, max_num_reqs)
    stride_bytes = problem.page_stride * ITEM_BYTES.get(problem.kv_dtype, 1)
    if stride_bytes % ALIGNMENT_BYTES:
        yield Refusal(
            code=RefusalCode.FEATURE,
            message="The copy engine cannot step over pages of this stride",
            got=f"kv_page_stride={problem.page_stride} ({stride_bytes} bytes)",
            allowed=f"a multiple of {ALIGNMENT_BYTES} bytes",
            fix="pad the cache's pages to such a stride, or use triton_mla",
        )


def _out_dtype(problem: DecodeProblem) -> Iterator[Refusal]:
    native = NATIVE_OUT.get(problem.q_dtype)
    if native is not None and problem.out_dtype in {"bf16", "fp16"} - {native}:
        yield Refusal(
            code=RefusalCode.DTYPE,
            message=f"The kernel of a {problem.q_dtype} query writes {native}",
            got=problem.out_dtype,
            allowed=native,
            fix=f"ask for out_dtype={native} and cast the output",
        )


def _rows(problem: DecodeProblem, num_sms: int) -> Iterator[Refusal]:
    heads, most = problem.num_q_heads, TILE_ROWS * num_sms
    longest = most // heads
    if problem.q_dtype == "fp8":
        longest = min(longest, FP8_MAX_QUERY_LEN)
    if longest == 0 and heads <= MAX_ROWS:
        yield Refusal(
            code=RefusalCode.NUM_HEADS,
            message=f"More query rows than {num_sms} multiprocessors have tiles for",
            got=str(heads),
            allowed=f"1..{most}",
            fix="change the tensor-parallel size, or use triton_mla",
        )
    too_long = sorted(q for q in problem.query_lens if longest < q <= MAX_ROWS)
    if longest and too_long:
        yield Refusal(
            code=RefusalCode.QUERY_LEN,
            message=f"A block of {heads} heads has too many rows for one request",
            got=describe(too_long),
            allowed=f"1..{longest} tokens (Q*H <= {most})",
            fix="verify in shorter blocks, or use triton_mla",
        )


def _requests(
    problem: DecodeProblem, num_sms: int, max_num_reqs: int
) -> Iterator[Refusal]:
    rows = problem.max_query_len * problem.num_q_heads
    splits = num_sm_parts(rows, num_sms)
    addressable = (MAX_ACCUMULATOR_ELEMENTS - 1) // (rows * LATENT_WIDTH) - splits
    most = min(max_num_reqs, addressable)
    if most < problem.max_num_reqs <= SCHEDULER_MAX_REQS:
        yield Refusal(
            code=RefusalCode.FEATURE,
            message="max_num_reqs is past what the library schedules or addresses",
            got=f"max_num_reqs={problem.max_num_reqs} with {rows} rows a request",
            allowed=f"max_num_reqs <= {max(most, 0)}",
            fix="lower max_num_reqs or the block length, or use triton_mla",
        )
