"""A backend that computes with the reference and refuses what it is told to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_decode import (
    BackendBase,
    Candidate,
    Capability,
    Cost,
    Mask,
    MLADecoder,
    PagedLatentCache,
    Refusal,
    RefusalCode,
)
from mla_decode.reference import ReferenceBackend
from mla_decode.reference.builder import ReferenceMetadataBuilder


class CausalOnlyBuilder(ReferenceMetadataBuilder):
    supports_non_causal_multi_token_decode = False


class Narrow(ReferenceBackend):
    """Kernels: a table of (query_len, mask, heads) to KV walks, and nothing else."""

    name = "narrow"

    def __init__(self, walks: dict[tuple[int, Mask, int], int]) -> None:
        self.walks = walks
        row = ReferenceBackend.capability.row("cpu")
        self.capability = Capability(
            rows=(
                replace(
                    row,
                    num_q_heads=frozenset(heads for _, _, heads in walks),
                    query_lens={
                        mask: frozenset(q for q, m, _ in walks if m is mask)
                        for mask in Mask
                    },
                ),
            )
        )

    @property
    def builder_cls(self):
        if any(mask is Mask.NON_CAUSAL for _, mask, _ in self.walks):
            return ReferenceMetadataBuilder
        return CausalOnlyBuilder

    def refusals(self, problem, device):
        found = BackendBase.refusals(self, problem, device)
        for query_len, mask in problem.blocks():
            if (query_len, mask, problem.num_q_heads) not in self.walks:
                found.append(
                    Refusal(
                        code=RefusalCode.QUERY_LEN,
                        message="No such kernel",
                        got=f"{query_len} {mask} {problem.num_q_heads}",
                        allowed=str(sorted(self.walks)),
                        fix="write one",
                    )
                )
        return found

    def cost(self, problem, device):
        del device
        worst = max(
            self.walks[query_len, mask, problem.num_q_heads]
            for query_len, mask in problem.blocks()
        )
        rows = problem.num_q_heads * problem.max_query_len
        return Cost(
            kv_walks=worst,
            rows=rows,
            launches=1,
            workspace_bytes=4 * rows * problem.max_num_reqs,
        )


def decoder_over(backend, problem, lowering="exact", **kwargs):
    candidates = {backend.name: Candidate(name=backend.name, backend=backend)}
    return MLADecoder(
        problem, backend.name, lowering, device="cpu", candidates=candidates, **kwargs
    )


@pytest.fixture(scope="session")
def narrow():
    """The class: its kernels are a table."""
    return Narrow


@pytest.fixture(scope="session")
def decoder():
    """A decoder over one backend object."""
    return decoder_over


@pytest.fixture(scope="session")
def batch_of():
    """A paged batch of random latents, pages shuffled and the tails poisoned."""

    def make(lens, query_lens, *, causal, page_size=16, heads=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        cache = PagedLatentCache(
            64 + sum(-(-n // page_size) for n in lens), page_size, dtype=torch.float32
        )
        cache.layers[0].fill_(torch.nan)
        cache._free = [
            cache._free[i]
            for i in torch.randperm(len(cache._free), generator=generator).tolist()
        ]
        for name, (seq_len, block) in enumerate(zip(lens, query_lens, strict=True)):
            cache.allocate(name)
            rows = max(seq_len, block)
            cache.append(name, [torch.randn(rows, 576, generator=generator)])
        common = replace(
            cache.batch(range(len(lens)), query_lens, causal=causal),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
        )
        rows = sum(query_lens)
        q = torch.randn(rows, heads, 576, generator=generator)
        return common, q, cache.layers[0]

    return make
