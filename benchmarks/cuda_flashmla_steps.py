"""Poisoned decode steps on any device, and their float64 truth, for the FlashMLA runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mla_decode import CommonAttentionMetadata, DecodeProblem
from mla_decode.dtypes import torch_dtype
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode.reference.oracle import decode_oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mla_decode import DeviceInfo

SCALE = 192**-0.5
TOLERANCE = {"bf16": 6e-3, "fp16": 8e-4, "fp8": 6e-2}
"""Of a row's relative error: four units of rounding of P and of the output."""
POISON_SLOTS = (-1, 2147480000)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One batch on the device; ``lens`` are its lengths on the host."""

    problem: DecodeProblem
    common: CommonAttentionMetadata
    q: Tensor
    kv: Tensor
    scales: dict[str, Tensor]

    def with_lens(self, lens: Sequence[int]) -> Step:
        """The same step at other lengths, within the pages that it filled."""
        tensor = torch.tensor(lens, dtype=torch.int32, device=self.q.device)
        common = replace(self.common, seq_lens=tensor, max_seq_len=max(lens))
        return replace(self, common=common)


def make_problem(**fields: Any) -> DecodeProblem:
    """A problem whose output dtype is the one that the kernel writes."""
    dtype = fields.setdefault("q_dtype", "bf16")
    fields.setdefault("kv_dtype", dtype)
    fields.setdefault("out_dtype", "fp16" if dtype == "fp16" else "bf16")
    fields.setdefault("max_num_reqs", 256)
    if dtype == "fp8":  # its LSE is refused
        fields["needs_lse"] = False
    return DecodeProblem(**fields)


def make_step(
    problem: DecodeProblem,
    lens: Sequence[int],
    query_len: int,
    device: DeviceInfo,
    *,
    capacity: int = 0,
    num_pages: int = 0,
) -> Step:
    """A step whose unused slots, page tails, spare pages and pad rows are poisoned.

    Args:
        problem: What the builder is for.
        lens: Keys of each request; trailing zeros are pads.
        query_len: Q.
        device: Where tensors live.
        capacity: Tokens of each request that are filled for later growth; 0: lens.
        num_pages: Pages of the cache at least; the used ones lie at random in it.
    """
    where = device.torch_device
    room = capacity or max(*lens, 1)
    pages = [-(-max(length, capacity) // problem.page_size) for length in lens]
    total = max(sum(pages) + 2, num_pages)
    order = torch.randperm(total - 1)[: sum(pages)] + 1
    slot = POISON_SLOTS[int(torch.randint(2, ()))]
    width = -(-room // problem.page_size) + 1
    table = torch.full((len(lens), width), slot, dtype=torch.int32)
    kv = torch.empty((total, problem.page_stride), dtype=torch.bfloat16, device=where)
    kv.fill_(math.nan)
    kv = kv.as_strided(
        (total, problem.page_size, ROW_WIDTH), (problem.page_stride, ROW_WIDTH, 1)
    )
    given = iter(torch.split(order, pages))
    for request, length in enumerate(lens):
        mine = next(given)
        table[request, : len(mine)] = mine
        filled = capacity or length
        tokens = torch.randn((len(mine) * 64, ROW_WIDTH), device=where)
        tokens[filled:] = math.nan
        kv[mine.to(where)] = tokens.view(-1, 64, ROW_WIDTH).to(kv.dtype)
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    blocks = [query_len if any(lens[i:]) else 0 for i in range(len(lens))]
    starts[1:] = torch.tensor(blocks).cumsum(0)
    rows = len(lens) * query_len
    q = torch.randn((rows, problem.num_q_heads, ROW_WIDTH), device=where)
    q[int(starts[-1]) :] = math.nan
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(where),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=where),
        num_reqs=len(lens),
        num_actual_tokens=rows,
        max_query_len=query_len,
        max_seq_len=max(lens),
        block_table_tensor=table.to(where),
    )
    if problem.kv_dtype != "bf16":
        kv = _cast(kv, torch_dtype(problem.kv_dtype, device), problem.page_stride)
    one = torch.ones(1, device=where)
    return Step(
        problem=problem,
        common=common,
        q=q.to(torch_dtype(problem.q_dtype, device)),
        kv=kv,
        scales={"q_scale": one, "kv_scale": one} if problem.q_dtype == "fp8" else {},
    )


def _cast(kv: Tensor, dtype: torch.dtype, stride: int) -> Tensor:
    flat = torch.empty((kv.shape[0], stride), dtype=dtype, device=kv.device)
    cast = flat.as_strided(kv.shape, (stride, ROW_WIDTH, 1))
    return cast.copy_(kv)


def truth(step: Step, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    """The oracle's (out, lse), float64 on the CPU."""
    common = step.common
    return decode_oracle(
        step.q,
        step.kv,
        common.block_table_tensor,
        common.seq_lens,
        common.query_start_loc,
        causal=True,
        softmax_scale=scale,
    )


def worst_error(
    out: Tensor, lse: Tensor | None, step: Step, scale: float = SCALE
) -> dict[str, float]:
    """Compare a result with the truth.

    Returns:
        ``out``: the worst row's relative error; ``lse``: the worst absolute one;
        ``empty``: rows without keys that are not (0, -inf).
    """
    expected, expected_lse = truth(step, scale)
    empty = expected_lse.isinf()
    got = out.cpu().double()
    norm = expected.norm(dim=-1)
    error = ((got - expected).norm(dim=-1) / norm)[~empty]
    wrong = (got[empty] != 0).any(dim=-1).sum().item() if empty.any() else 0
    lse_error = 0.0
    if lse is not None:
        found = lse.cpu().double()
        wrong += (found[empty] != -math.inf).sum().item()
        gap = (found - expected_lse).abs()[~empty]
        lse_error = _worst(gap)
    return {"out": _worst(error), "lse": lse_error, "empty": float(wrong)}


def _worst(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    return math.inf if values.isnan().any() else float(values.max())


def outputs_for(step: Step) -> dict[str, Tensor]:
    """Caller's outputs, full of NaN."""
    rows, heads = step.q.shape[:2]
    dtype = torch.float16 if step.problem.out_dtype == "fp16" else torch.bfloat16
    out = torch.full(
        (rows, heads, LATENT_WIDTH), math.nan, dtype=dtype, device=step.q.device
    )
    lse = torch.full((rows, heads), math.nan, device=step.q.device)
    return {"out": out, "lse": lse} if step.problem.needs_lse else {"out": out}
