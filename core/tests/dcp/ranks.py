"""One rank of a gloo group: decodes its share, merges, compares with the oracle."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mla_decode import (
    ArgumentError,
    CommonAttentionMetadata,
    Dcp,
    DecodeOutput,
    DecodeProblem,
    Mask,
    MLADecoder,
    PagedLatentCache,
)
from mla_decode.dcp import DcpMerger, local_seq_lens, merge_partials, owned_tokens
from mla_decode.reference.oracle import decode_oracle

HEADS, PAGE, SCALE = 4, 16, 192**-0.5
LENS = ([17, 40, 5], [1, 3, 0], [64, 9, 33])


def batch(lens, query_len, width, *, causal, table, local):
    starts = torch.arange(0, (len(lens) + 1) * query_len, query_len, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(lens),
        num_actual_tokens=len(lens) * query_len,
        max_query_len=query_len,
        max_seq_len=max(lens),
        block_table_tensor=table[:, :width],
        causal=causal,
        dcp_local_seq_lens=torch.tensor(local, dtype=torch.int32),
    )


def check(dcp, lens, query_len, *, causal, scatter):
    """Decode one batch over the group; every rank draws the same data."""
    generator = torch.Generator().manual_seed(sum(lens) + query_len)
    lens = [0 if n < query_len else n for n in lens]
    rows = [torch.randn(n, 576, generator=generator) for n in lens]
    q = torch.randn(len(lens) * query_len, HEADS, 576, generator=generator)
    cache = PagedLatentCache(64, PAGE, dtype=torch.float32)
    cache.layers[0].fill_(torch.nan)
    table = torch.full((len(lens), 8), -1, dtype=torch.int32)
    for name, latents in enumerate(rows):
        cache.allocate(name)
        mine = latents[owned_tokens(len(latents), dcp)]
        cache.append(name, [mine])
        pages = cache._pages[name]
        table[name, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    problem = DecodeProblem(
        num_q_heads=HEADS,
        q_dtype="fp32",
        kv_dtype="fp32",
        out_dtype="fp32",
        page_size=PAGE,
        query_lens=frozenset({query_len}),
        masks=frozenset({Mask.CAUSAL if causal else Mask.NON_CAUSAL}),
        dcp=dcp,
        max_num_reqs=len(lens),
        max_model_len=128,
    )
    decoder = MLADecoder(problem, "reference", "exact", device="cpu")
    local = [local_seq_lens(n, dcp) for n in lens]
    common = batch(lens, query_len, 8, causal=causal, table=table, local=local)
    merger = DcpMerger(problem, device="cpu", scatter_heads=scatter)
    partial = decoder.run(q, cache.layers[0], decoder.plan(common), softmax_scale=SCALE)
    out, lse = merger.merge(partial)
    whole = torch.zeros(len(lens), max(*lens, 1), 576)
    for name, latents in enumerate(rows):
        whole[name, : len(latents)] = latents
    truth, truth_lse = decode_oracle(
        q,
        whole,
        torch.arange(len(lens)).unsqueeze(1),
        torch.tensor(lens),
        common.query_start_loc_cpu,
        causal=causal,
        softmax_scale=SCALE,
    )
    if scatter:
        share = HEADS // dcp.world
        mine = slice(dcp.rank * share, (dcp.rank + 1) * share)
        truth, truth_lse = truth[:, mine], truth_lse[:, mine]
    torch.testing.assert_close(out.double(), truth, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-5, rtol=1e-4)


class Operators(TorchDispatchMode):
    """Names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def check_cost(dcp, *, scatter):
    """One collective; no operator but those that a rank's part needs; no temporary."""
    problem = DecodeProblem(
        num_q_heads=HEADS, dcp=dcp, max_num_reqs=4, max_model_len=128
    )
    merger = DcpMerger(problem, device="cpu", scatter_heads=scatter)
    generator = torch.Generator().manual_seed(HEADS)
    drawn = torch.randn(dcp.world, 4, HEADS, 513, generator=generator)
    outs, lses = drawn[..., 1:].bfloat16(), drawn[..., 0]  # an LSE that is no dense one
    out, lse = outs[dcp.rank], lses[dcp.rank]
    whole = merger.merge(DecodeOutput(out, lse))
    share = HEADS // dcp.world
    mine = slice(dcp.rank * share, (dcp.rank + 1) * share) if scatter else slice(None)
    mixed, total = merge_partials(outs[:, :, mine], lses[:, :, mine])
    assert torch.equal(whole.out, mixed.bfloat16())  # rounded once, at the end
    assert torch.equal(whole.lse, total)
    one = DecodeOutput(out[:1], lse[:1])
    first = merger.merge(one)
    with Operators() as ran:
        again = merger.merge(one)
    names = ran.names
    assert sum(name.startswith("c10d.") for name in names) == 1, names
    assert len(names) <= 9 + 2 * dcp.world, names
    allocating = [name for name in names if name.endswith((".default", ".Tensor"))]
    views = {"aten.unsqueeze.default", "aten.as_strided.default", "aten.detach.default"}
    fresh = [n for n in allocating if n not in views and not n.startswith("c10d.")]
    assert fresh == ["aten.empty_like.default", "aten.logaddexp.default"], names
    for given, kept in zip(again, first, strict=True):
        assert torch.equal(given, kept)
        assert given.data_ptr() != kept.data_ptr()
    for given, kept in zip(first, whole, strict=True):
        assert torch.equal(given, kept[:1])


def main():
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    count = 0
    for interleave in (1, 4):
        dcp = Dcp(world=world, rank=rank, interleave=interleave)
        for lens in LENS:
            for query_len, causal in ((1, True), (3, True), (3, False), (4, False)):
                check(dcp, lens, query_len, causal=causal, scatter=count % 2 == 0)
                count += 1
    for scatter in (True, False):
        check_cost(Dcp(world=world, rank=rank), scatter=scatter)
    with pytest.raises(ArgumentError, match="divide"):
        DcpMerger(DecodeProblem(num_q_heads=world + 1, dcp=dcp), device="cpu")
    dist.destroy_process_group()
    sys.stdout.write(f"checked {count} batches\n")


if __name__ == "__main__":
    main()
