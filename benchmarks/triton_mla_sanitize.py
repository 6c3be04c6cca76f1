"""A few small steps for a memory or race checker to watch.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
    python benchmarks/triton_mla_sanitize.py
"""

from __future__ import annotations

import torch

from mla_decode import CommonAttentionMetadata, DecodeProblem, Mask, detect_device
from mla_decode_triton import chosen_backend

backend = chosen_backend("portable")
CASES = (
    # H, Q, page, kv_dtype
    (16, 1, 64, "bf16"),
    (5, 3, 1, "bf16"),
    (128, 1, 16, "bf16"),
    (16, 8, 64, "bf16"),
    (16, 1, 32, "fp8"),
    (20, 4, 128, "fp8"),
)
LENGTHS = (32, 200, 64, 321, 0)


def run_case(heads: int, query_len: int, page_size: int, kv_dtype: str) -> float:
    """Decode under both masks; the cache holds not one page more than is used."""
    used = [-(-n // page_size) for n in LENGTHS]
    table = torch.full((len(LENGTHS), max(used)), -1, dtype=torch.int32)
    pages = torch.randperm(sum(used)).int().split(used)
    for request, mine in enumerate(pages):
        table[request, : len(mine)] = mine
    cache = torch.randn(sum(used), page_size, 576).cuda()
    cache = cache.to(torch.float8_e4m3fn if kv_dtype == "fp8" else torch.bfloat16)
    starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32) * query_len
    starts[-1] = starts[-2]
    problem = DecodeProblem(
        num_q_heads=heads,
        kv_dtype=kv_dtype,
        page_size=page_size,
        query_lens=frozenset({query_len}),
        masks=frozenset(Mask),
        needs_lse=True,
        max_num_reqs=len(LENGTHS),
        max_model_len=max(LENGTHS),
    )
    builder = backend.builder_cls(problem, detect_device())
    q = torch.randn(len(LENGTHS) * query_len, heads, 576).bfloat16().cuda()
    scale = torch.ones(1, device="cuda") if kv_dtype == "fp8" else None
    total = 0.0
    for causal in (False, True):
        common = CommonAttentionMetadata(
            query_start_loc=starts.cuda(),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(LENGTHS, dtype=torch.int32, device="cuda"),
            num_reqs=len(LENGTHS),
            num_actual_tokens=int(starts[-1]),
            max_query_len=query_len,
            max_seq_len=max(LENGTHS),
            block_table_tensor=table.cuda(),
            causal=causal,
        )
        metadata = builder.build(common)
        out = backend.forward(
            q, cache, metadata, softmax_scale=192**-0.5, kv_scale=scale
        )
        total += out.out.float().abs().sum().item()
    return total


if __name__ == "__main__":
    torch.manual_seed(0)
    for case in CASES:
        print(*case, f"{run_case(*case):.1f}", flush=True)
