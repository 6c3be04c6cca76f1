"""The steps that most cases take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_decode.mask import Mask
from mla_decode_contract.call import Result, check, decode
from mla_decode_contract.scene import Scene, draw_scene

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_decode.problem import DecodeProblem
    from mla_decode_contract.context import CaseContext

CAUSAL, NON_CAUSAL = (Mask.CAUSAL,), (Mask.NON_CAUSAL,)


def block_problem(
    ctx: CaseContext, query_len: int, *, causal: bool, **must: Any
) -> DecodeProblem:
    """A problem of one block length under one mask."""
    masks = CAUSAL if causal else NON_CAUSAL
    return ctx.problem(query_lens=(query_len,), masks=masks, **must)


def fp8_problem(ctx: CaseContext, **must: Any) -> DecodeProblem:
    """A problem over an fp8 cache, with an fp8 query where one is declared."""
    declared = ctx.row.dtypes
    pairs = (("fp8", "fp8"), ("bf16", "fp8"), ("fp16", "fp8"))
    pair = next((p for p in pairs if p in declared), pairs[0])
    return ctx.problem(dtypes=pair, **must)


def longer_block(ctx: CaseContext, *, causal: bool, wanted: int = 2) -> int:
    """A block of several tokens that the row declares; else the wanted length."""
    mask = Mask.CAUSAL if causal else Mask.NON_CAUSAL
    allowed = ctx.row.query_lens.get(mask, ())
    lengths = (wanted, *range(2, 17))
    return next((length for length in lengths if length in allowed), wanted)


def serve(
    ctx: CaseContext, problem: DecodeProblem, seq_lens: Sequence[int], **scene: Any
) -> tuple[Scene, Result]:
    """Draw a batch, decode it into fenced buffers, and demand the oracle's values."""
    drawn = draw_scene(ctx, problem, seq_lens, **scene)
    result = decode(drawn)
    check(drawn, result)
    return drawn, result
