"""Poisoned decode steps: whatever must not be read holds NaN or a bad page."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mla_decode import CommonAttentionMetadata, DecodeProblem
from mla_decode.dtypes import torch_dtype
from mla_decode.reference.oracle import decode_oracle
from mla_decode_triton import chosen_backend

backend = chosen_backend("portable")
SCALE = 192**-0.5
KV_SCALE = 0.375


@dataclass(frozen=True, kw_only=True)
class Step:
    """One batch with its tensors, and the truth about it."""

    problem: DecodeProblem
    common: CommonAttentionMetadata
    q: torch.Tensor
    kv_cache: torch.Tensor
    kv_scale: torch.Tensor | None
    causal: bool

    def oracle(self):
        return decode_oracle(
            self.q,
            self.kv_cache,
            self.common.block_table_tensor,
            self.common.seq_lens,
            self.common.query_start_loc,
            causal=self.causal,
            softmax_scale=SCALE,
            kv_scale=1.0 if self.kv_scale is None else KV_SCALE,
        )

    def truth(self):
        """`oracle` where the step lies: on a GPU a grid of blocks takes a second."""
        common, page_size = self.common, self.kv_cache.shape[1]
        rows, heads, _ = self.q.shape
        out = self.q.new_zeros(rows, heads, 512, dtype=torch.float64)
        lse = out.new_full((rows, heads), -torch.inf)
        starts = common.query_start_loc_cpu.tolist()
        for request, seq_len in enumerate(common.seq_lens.tolist()):
            own = slice(starts[request], starts[request + 1])
            if not seq_len or own.start == own.stop:
                continue
            pages = common.block_table_tensor[request, : -(-seq_len // page_size)]
            keys = self.kv_cache[pages.long()].double().view(-1, 576)[:seq_len]
            keys = keys * (1.0 if self.kv_scale is None else KV_SCALE)
            scores = self.q[own].double() @ keys.T * SCALE
            if self.causal:
                ends = torch.arange(own.start - own.stop, 0, device=keys.device)
                last_seen = seq_len + ends[:, None, None]
                key = torch.arange(seq_len, device=keys.device)
                scores = scores.masked_fill(key > last_seen, -torch.inf)
            lse[own] = scores.logsumexp(-1)
            out[own] = (scores - lse[own][..., None]).exp() @ keys[:, :512]
        return out, lse

    def under(self, *, causal):
        """The same tensors under a mask."""
        fields = {n: getattr(self.common, n) for n in type(self.common).__slots__}
        common = type(self.common)(**fields | {"causal": causal})
        return replace(self, causal=causal, common=common)

    def run(self, builder, by=backend, **kwargs):
        return by.forward(
            self.q,
            self.kv_cache,
            builder.build(self.common),
            softmax_scale=SCALE,
            kv_scale=self.kv_scale,
            **kwargs,
        )


def make_step(
    problem, device, seq_lens, *, query_len, causal, seed=0, slack_pages=3, stride=None
):
    """A batch of `problem` with these lengths (0: a pad, at the tail only)."""
    torch.manual_seed(seed)
    where = torch.device(device.torch_device)
    page_size = problem.page_size
    used = [-(-n // page_size) for n in seq_lens]
    num_pages = sum(used) + slack_pages
    storage = torch.full((num_pages, stride or page_size * 576), torch.nan)
    cache = storage[:, : page_size * 576].view(num_pages, page_size, 576)
    pages = torch.randperm(num_pages)
    table = torch.full((len(seq_lens), max([*used, 1]) + 2), -1, dtype=torch.int32)
    taken = 0
    for request, (seq_len, count) in enumerate(zip(seq_lens, used, strict=True)):
        mine = pages[taken : taken + count]
        taken += count
        table[request, :count] = mine.int()
        table[request, count + 1 :] = 2147480000
        rows = torch.randn(seq_len, 576)
        for index, page in enumerate(mine.tolist()):
            part = rows[index * page_size : (index + 1) * page_size]
            cache[page, : part.shape[0]] = part
    num_reqs = len(seq_lens)
    live = sum(n > 0 for n in seq_lens)
    q = torch.full((num_reqs * query_len, problem.num_q_heads, 576), torch.nan)
    q[: live * query_len] = torch.randn(live * query_len, problem.num_q_heads, 576)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32).clamp(max=live) * query_len
    is_fp8 = problem.kv_dtype == "fp8"
    storage = storage.to(torch_dtype(problem.kv_dtype, device)).to(where)
    return Step(
        problem=problem,
        common=CommonAttentionMetadata(
            query_start_loc=starts.to(where),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=where),
            num_reqs=num_reqs,
            num_actual_tokens=live * query_len,
            max_query_len=query_len,
            max_seq_len=max(seq_lens),
            block_table_tensor=table.to(where),
            causal=causal,
        ),
        q=q.to(torch_dtype(problem.q_dtype, device)).to(where),
        kv_cache=storage[:, : page_size * 576].view(num_pages, page_size, 576),
        kv_scale=torch.tensor([KV_SCALE], device=where) if is_fp8 else None,
        causal=causal,
    )


def relative_error(out, truth):
    """Of the worst request-independent norm; NaN never passes a comparison."""
    out = out.to(truth.device).double()
    return ((out - truth).norm() / truth.norm()).item()
