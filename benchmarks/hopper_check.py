"""The Hopper kernel against float64 on one poisoned batch."""

from __future__ import annotations

import math

import torch
from hopper_peers import SCALE, make_step
from hopper_points import Point
from torch import Tensor

from mla_decode_triton.hopper.grid import rows_of_program


def worst_error(
    heads: int,
    query_len: int,
    page: int,
    dtype: torch.dtype,
    lens: list[int],
    *,
    causal: bool,
) -> float:
    """Largest relative error of a request, or infinity where EMPTY, lse or repetition fails.

    By programs of 16 rows, as batches of few keys have them, and by the usual ones.
    """
    point = Point(
        heads=heads,
        query_len=query_len,
        requests=len(lens),
        mean=max(lens),
        causal=causal,
    )
    rows = query_len * heads
    width = -(-max(lens) // page)
    needed = sum(-(-n // page) for n in lens)
    cache = torch.full((needed + 3, page, 576), math.nan, dtype=dtype, device="cuda")
    table_ = torch.full((len(lens), width), -(2**30), dtype=torch.int32, device="cuda")
    order = torch.randperm(needed + 3).tolist()
    q = torch.randn(len(lens) * query_len, heads, 576, device="cuda").to(dtype)
    keys = {}
    for req, n in enumerate(lens):
        mine = torch.tensor(
            [order.pop() for _ in range(-(-n // page))], dtype=torch.long, device="cuda"
        )
        table_[req, : len(mine)] = mine.to(torch.int32)
        keys[req] = torch.randn(n, 576, device="cuda").to(dtype)
        flat = torch.full((len(mine) * page, 576), math.nan, dtype=dtype, device="cuda")
        flat[:n] = keys[req]
        cache[mine] = flat.view(-1, page, 576)
        if n == 0:
            q[req * query_len : (req + 1) * query_len] = math.nan
    lens_ = torch.tensor(lens, dtype=torch.int32, device="cuda")
    worst = 0.0
    for rows_of_one in sorted({16, rows_of_program(rows)}):
        step = make_step(point, rows=rows_of_one)
        outs = []
        for _ in range(3):
            out = torch.full((len(q), heads, 512), math.nan, dtype=dtype, device="cuda")
            lse = torch.full((len(q), heads), math.nan, device="cuda")
            step.build(lens_)
            step.forward(
                q[..., :512],
                q[..., 512:],
                cache,
                table_,
                lens_,
                out,
                lse,
                softmax_scale=SCALE,
                causal=causal,
                max_seq_len=max(lens),
            )
            outs.append((out, lse))
        torch.cuda.synchronize()
        for later in outs[1:]:
            for a, b in zip(later, outs[0], strict=True):
                if not torch.equal(a, b):
                    return math.inf
        error = _error(*outs[0], q, keys, lens, query_len, heads, causal=causal)
        worst = max(worst, error)
    return worst


def _error(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    keys: dict[int, Tensor],
    lens: list[int],
    query_len: int,
    heads: int,
    *,
    causal: bool,
) -> float:
    """Largest relative error of a request, or infinity where EMPTY or lse fails."""
    rows = query_len * heads
    worst = 0.0
    out, lse = (x.double().view(len(lens), rows, -1) for x in (out, lse))
    for req, n in enumerate(lens):
        if n == 0:
            if out[req].any() or not (lse[req] == -math.inf).all():
                return math.inf
            continue
        scores = (
            q.view(len(lens), rows, 576)[req].double() @ keys[req].double().T * SCALE
        )
        if causal:
            visible = n - query_len + torch.arange(rows, device="cuda") // heads + 1
            scores.masked_fill_(
                torch.arange(n, device="cuda")[None] >= visible[:, None], -math.inf
            )
        expected = scores.softmax(-1) @ keys[req][:, :512].double()
        if not torch.allclose(lse[req, :, 0], scores.logsumexp(-1), atol=1e-3, rtol=0):
            return math.inf
        error = ((out[req] - expected).norm() / expected.norm()).item()
        worst = max(worst, error) if error == error else math.inf  # noqa: PLR0124 - NaN
    return worst
