"""BLOCK: uniform and ragged blocks, pads at the tail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.batch import QueryLenSupport
from mla_decode.errors import BackendRefused, BatchError
from mla_decode.mask import Mask
from mla_decode_contract.cases.common import block_problem, longer_block, serve
from mla_decode_contract.demand import demand_error, require_code
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext


@implements("block.pads_at_tail")
def pads_at_tail(ctx: CaseContext) -> None:
    """Two real requests, two pads."""
    serve(ctx, ctx.problem(), [20, 45], num_pads=2)


@implements("block.pads_non_causal")
def pads_non_causal(ctx: CaseContext) -> None:
    """Pads behind non-causal blocks."""
    query_len = longer_block(ctx, causal=False, wanted=3)
    problem = block_problem(ctx, query_len, causal=False)
    serve(ctx, problem, [20, 45], num_pads=2, causal=False)


@implements("block.uncounted_pads")
def uncounted_pads(ctx: CaseContext) -> None:
    """The engine's token count leaves the pads out."""
    query_len = longer_block(ctx, causal=True)
    allowed = ctx.row.query_lens.get(Mask.CAUSAL, ())
    query_len = query_len if query_len in allowed else 1
    problem = ctx.problem(query_lens=(query_len,))
    serve(ctx, problem, [20, 45], num_pads=2, counts_pads=False)


@implements("block.all_pads")
def all_pads(ctx: CaseContext) -> None:
    """Nothing but pads."""
    _, result = serve(ctx, ctx.problem(), [], num_pads=3)
    require(result.out.shape[0] == 3, "an all-pad batch has num_reqs * Q rows")


@implements("block.ragged")
def ragged(ctx: CaseContext) -> None:
    """Blocks of 1, 3 and 2 tokens."""
    lengths = (1, 3, 2)
    problem = ctx.problem(query_lens=lengths, masks=(Mask.CAUSAL,))
    if ctx.backend.builder_cls.query_len_support is QueryLenSupport.VARLEN:
        serve(ctx, problem, [20, 45, 9], block_lens=lengths, pad_rows=2)
        return
    scene = draw_scene(ctx, problem, [20, 45, 9], block_lens=lengths)
    builder = ctx.builder(problem)
    demand_error(BatchError, "mixed blocks", lambda: builder.build(scene.common))
    ctx.notes.append("not VARLEN: the BatchError was demanded")


@implements("block.ragged_non_causal_refused")
def ragged_non_causal(ctx: CaseContext) -> None:
    """One batch, one block length, where tokens see their siblings."""
    allowed = ctx.row.query_lens.get(Mask.NON_CAUSAL, ())
    lengths = tuple(n for n in range(2, 17) if n in allowed)[:2] or (2, 3)
    problem = ctx.problem(query_lens=lengths, masks=(Mask.NON_CAUSAL,))
    if len(lengths) == 1:
        lengths = (lengths[0], 1)
    scene = draw_scene(ctx, problem, [20, 45], block_lens=lengths, causal=False)
    builder = ctx.builder(problem)
    demand_error(BatchError, "mixed blocks", lambda: builder.build(scene.common))


@implements("block.pad_in_front_refused")
def pad_in_front(ctx: CaseContext) -> None:
    """Query lengths 0, 1."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    starts = torch.tensor([0, 0, 1], dtype=torch.int32)
    common = scene.with_common(
        query_start_loc=starts.to(ctx.torch_device),
        query_start_loc_cpu=starts,
        num_actual_tokens=1,
    )
    builder = ctx.builder(problem)
    demand_error(BatchError, "a pad in front", lambda: builder.build(common))


@implements("block.unnamed_query_len_refused")
def unnamed_query_len(ctx: CaseContext) -> None:
    """The problem names one-token blocks; a block of 5 comes."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45], query_len=5)
    builder = ctx.builder(problem)
    error = demand_error(
        (BackendRefused, BatchError),
        "a block of 5 where 1 is named",
        lambda: builder.build(scene.common),
    )
    if isinstance(error, BackendRefused):
        require_code(error.codes, frozenset({"query_len"}), "build()")


@implements("block.unnamed_mask_refused")
def unnamed_mask(ctx: CaseContext) -> None:
    """The problem names causal blocks; a non-causal batch comes."""
    query_len = longer_block(ctx, causal=True)
    problem = block_problem(ctx, query_len, causal=True)
    scene = draw_scene(ctx, problem, [20, 45], causal=False)
    builder = ctx.builder(problem)
    error = demand_error(
        BackendRefused,
        "a non-causal batch where causal is named",
        lambda: builder.build(scene.common),
    )
    if isinstance(error, BackendRefused):
        require_code(error.codes, frozenset({"mask"}), "build()")
