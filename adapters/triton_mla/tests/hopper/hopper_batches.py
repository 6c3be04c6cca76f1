"""Poisoned batches for the Hopper kernel, and what it must make of them."""

import math

import torch

SCALE = 576**-0.5
KV_SCALE = 0.375
LENS = [300, 0, 4, 64, 129, 0]


def make_batch(lens, query_len, num_heads, page, dtype, *, seed=0, gap=0):
    """A poisoned batch: everything that must not be read is NaN or out of range."""
    generator = torch.Generator().manual_seed(seed)
    pages_of = [math.ceil(n / page) for n in lens]
    num_pages = sum(pages_of) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    width = max([*pages_of, 1]) + 2
    table = torch.full((len(lens), width), -(2**30), dtype=torch.int32)
    storage = torch.full((num_pages, page * 576 + gap), float("nan"), dtype=dtype)
    cache = storage[:, : page * 576].view(num_pages, page, 576)
    for req, length in enumerate(lens):
        for j in range(pages_of[req]):
            number = order.pop()
            table[req, j] = number
            live = min(page, length - j * page)
            cache[number, :live] = torch.randn(live, 576, generator=generator).to(dtype)
    rows = query_len * num_heads
    q = torch.randn(len(lens), rows, 576, generator=generator).to(dtype)
    for req, length in enumerate(lens):
        if length == 0:
            q[req] = float("nan")
    return q, cache, table


def raise_scores(q, cache, table, rows, rises, kv_scale=1.0):
    """Raise scores of the first request's rows by so much, in log2, page by page.

    Changes the last column of queries and cache, in place.
    """
    unit = SCALE * math.log2(math.e) * 64 * kv_scale
    q[..., -1] = 0.0
    q[0, rows, -1] = 64.0
    column = torch.zeros(cache.shape[:2])
    for page, rise in zip(table[0], rises, strict=False):
        column[page] = rise / unit
    cache[..., -1] = column.to(cache.dtype)


def oracle(q, cache, table, lens, query_len, num_heads, *, causal, scale=SCALE):
    """float64, one request at a time."""
    out = torch.zeros(*q.shape[:2], 512, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    page = cache.shape[1]
    token = torch.arange(q.shape[1]) // num_heads
    for req, length in enumerate(lens):
        if length == 0:
            continue
        pages = table[req, : math.ceil(length / page)].long()
        keys = cache[pages].reshape(-1, 576)[:length].double()
        scores = q[req].double() @ keys.T * scale
        if causal:
            visible = length - query_len + token + 1
            hidden = torch.arange(length)[None] >= visible[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        lse[req] = scores.logsumexp(-1)
        weights = (scores - lse[req].nan_to_num(neginf=0)[:, None]).exp()
        out[req] = weights @ keys[:, :512]
    return out, lse


def check(result, expected):
    (out, lse), (out_ref, lse_ref) = result, expected
    for req in range(out.shape[0]):
        error = (out[req].double() - out_ref[req]).norm()
        assert error <= 6e-3 * out_ref[req].norm()
        assert torch.equal(lse[req].isneginf(), lse_ref[req].isneginf())
        finite = ~lse_ref[req].isneginf()
        torch.testing.assert_close(
            lse[req][finite].double(), lse_ref[req][finite], atol=2e-4, rtol=0
        )
