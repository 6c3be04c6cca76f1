"""OUT: the caller's buffers, every row, and nothing else."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode_contract.call import check, decode, forward, output_buffers
from mla_decode_contract.cases.common import longer_block, serve
from mla_decode_contract.demand import demand_error
from mla_decode_contract.reachable import poison_floats
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode.problem import DecodeProblem
    from mla_decode_contract.context import CaseContext


def _block_problem(ctx: CaseContext) -> DecodeProblem:
    """The longest easy block that some mask declares; one token where none is."""
    query_len = longer_block(ctx, causal=True)
    allowed = {
        n for lens in ctx.row.query_lens.values() for n in (query_len,) if n in lens
    }
    if not allowed:
        return ctx.problem()
    mask = next(m for m, lens in ctx.row.query_lens.items() if query_len in lens)
    return ctx.problem(query_lens=(query_len,), masks=(mask,))


@implements("out.filled_in_place")
def filled_in_place(ctx: CaseContext) -> None:
    """The very tensors come back, filled."""
    problem = _block_problem(ctx)
    causal = "causal" in {m.value for m in problem.masks}
    scene = draw_scene(ctx, problem, [20, 45], causal=causal)
    metadata = ctx.builder(problem).build(scene.common)
    out, lse = output_buffers(scene)
    buffers: dict[str, Any] = {"out": out.tensor}
    if lse is not None:
        buffers["lse"] = lse.tensor
    result = forward(scene, metadata, **buffers)
    require(
        result.out.data_ptr() == out.tensor.data_ptr(),
        "the returned out is not the caller's buffer",
    )
    check(scene, result)
    for name, fence in (("out", out), ("lse", lse)):
        if fence is not None:
            kept = fence.storage[fence.fence_bytes : -fence.fence_bytes]
            mine = getattr(result, name)
            require(
                torch.equal(kept.view(mine.dtype).view(mine.shape), mine),
                f"the caller's {name} memory does not hold the result",
            )


@implements("out.allocated")
def allocated(ctx: CaseContext) -> None:
    """No buffers passed."""
    problem = _block_problem(ctx)
    causal = "causal" in {m.value for m in problem.masks}
    scene = draw_scene(ctx, problem, [20, 45], causal=causal, num_pads=1)
    metadata = ctx.builder(problem).build(scene.common)
    check(scene, forward(scene, metadata))


@implements("out.every_row_written")
def every_row_written(ctx: CaseContext) -> None:
    """Buffers full of NaN; pads and empty requests among the rows."""
    problem = _block_problem(ctx)
    causal = "causal" in {m.value for m in problem.masks}
    scene, result = serve(ctx, problem, [20, 0, 45], causal=causal, num_pads=2)
    require(not bool(result.out.isnan().any()), "out has rows that were not written")
    if result.lse is not None:
        require(not bool(result.lse.isnan().any()), "lse has rows not written")
    require(scene.num_rows == result.out.shape[0], "rows are missing")


@implements("out.canaries")
def canaries(ctx: CaseContext) -> None:
    """A single row, and many: `decode` checks the fences."""
    problem = ctx.problem()
    for lens, pads in (([33], 0), ([5, 70, 20], 3)):
        serve(ctx, problem, lens, num_pads=pads)


@implements("out.bad_buffers_refused")
def bad_buffers(ctx: CaseContext) -> None:
    """Wrong shape, dtype, layout."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45])
    metadata = ctx.builder(problem).build(scene.common)
    dtype = torch_dtype(problem.out_dtype, ctx.device)
    heads, device = problem.num_q_heads, ctx.torch_device
    wide = torch.zeros((2, heads, 1024), dtype=dtype, device=device)
    wrong = {
        "one row more": torch.zeros((3, heads, 512), dtype=dtype, device=device),
        "a width of 576": torch.zeros((2, heads, 576), dtype=dtype, device=device),
        "float64": torch.zeros((2, heads, 512), dtype=torch.float64, device=device),
        "rows apart": wide[..., :512],
    }
    for what, tensor in wrong.items():
        demand_error(
            (ValueError, RuntimeError),
            f"out with {what}",
            partial(forward, scene, metadata, out=tensor),
        )
        require(bool((tensor == 0).all()), f"out with {what} was written to")


@implements("out.workspace_poisoned")
def workspace_poisoned(ctx: CaseContext) -> None:
    """Every float tensor that the builder and metadata hold is NaN before the step."""
    problem = ctx.problem()
    builder = ctx.builder(problem)
    first = draw_scene(ctx, problem, [50, 120])
    check(first, decode(first, builder))
    count = poison_floats(builder, spared=ctx.inputs)
    scene = draw_scene(ctx, problem, [20, 0, 45])
    ctx.notes.append(f"{count} float tensors of the builder were poisoned")
    check(scene, decode(scene, builder))


@implements("out.dtypes")
def dtypes(ctx: CaseContext) -> None:
    """All that the row declares."""
    for name in sorted(ctx.row.out_dtypes):
        serve(ctx, ctx.problem(out_dtype=name), [20, 45])
