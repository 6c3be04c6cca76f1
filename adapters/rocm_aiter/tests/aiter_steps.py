"""One step through the adapter: a problem, a batch, poisoned buffers, the truth."""

import torch

from mla_decode import CommonAttentionMetadata, DecodeProblem, DeviceInfo, Mask
from mla_decode.dtypes import torch_dtype
from mla_decode.reference.oracle import decode_oracle
from mla_decode_rocm_aiter import backend

SCALE = 192**-0.5


def device_of(arch="gfx950", release="0.1.20.post1"):
    """An assumed device with an AITER assumed on it."""
    return DeviceInfo.assume(arch, libraries={"amd-aiter": release})


def problem_of(heads=16, q=1, *, causal=True, dtypes="bf16 bf16", **words):
    """A problem with one block length and one mask."""
    q_dtype, kv_dtype = dtypes.split()
    given = {"page_size": 16, "max_num_reqs": 6, "max_model_len": 512} | words
    return DecodeProblem(
        num_q_heads=heads,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        query_lens=frozenset({q} if isinstance(q, int) else q),
        masks=frozenset({Mask.CAUSAL if causal else Mask.NON_CAUSAL}),
        **given,
    )


class Step:
    """A drawn batch of a problem, its tensors poisoned where nothing may be read."""

    def __init__(self, problem, device, seq_lens, *, q=None, causal=True, seed=0):
        self.problem, self.device = problem, device
        self.q_len = q or problem.max_query_len
        self.causal = causal
        generator = torch.Generator().manual_seed(seed)
        size = problem.page_size
        counts = [-(-length // size) for length in seq_lens]
        pages = sum(counts) + 2
        stride = problem.page_stride
        flat = torch.full((pages * stride,), torch.nan)
        cache = flat.as_strided((pages, size, 576), (stride, 576, 1))
        order = torch.randperm(pages, generator=generator).tolist()
        table = torch.full((len(seq_lens), problem.table_width), -1, dtype=torch.int32)
        for request, length in enumerate(seq_lens):
            for slot in range(counts[request]):
                page = order.pop()
                table[request, slot] = page
                rows = min(size, length - slot * size)
                values = torch.randn(rows, 576, generator=generator)
                cache[page, :rows] = values * 0.3
        rows = len(seq_lens) * self.q_len
        query = torch.randn(rows, problem.num_q_heads, 576, generator=generator)
        self.q = query.to(torch_dtype(problem.q_dtype, device))
        kv_dtype = torch_dtype(problem.kv_dtype, device)
        dense = flat.to(kv_dtype)
        self.cache = dense.as_strided((pages, size, 576), (stride, 576, 1))
        starts = torch.arange(0, rows + 1, self.q_len, dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=len(seq_lens),
            num_actual_tokens=rows,
            max_query_len=self.q_len,
            max_seq_len=max([*seq_lens, 1]),
            block_table_tensor=table,
            causal=causal,
        )
        self.scales = {}
        if problem.q_dtype == "fp8":
            self.scales["q_scale"] = torch.tensor([0.7])
        if problem.kv_dtype == "fp8":
            self.scales["kv_scale"] = torch.tensor([1.3])

    def run(self, builder, *, q=None, **words):
        """Build and decode; returns (metadata, output)."""
        metadata = builder.build(self.common)
        return metadata, self.decode(metadata, q=q, **words)

    def decode(self, metadata, *, q=None, **words):
        """Decode with a poisoned output buffer."""
        query = self.q if q is None else q
        rows = query[0] if isinstance(query, tuple) else query
        out = torch.full((*rows.shape[:2], 512), torch.nan, dtype=torch.bfloat16)
        given = {"out": out} | self.scales | words
        return backend.forward(
            query, self.cache, metadata, softmax_scale=SCALE, **given
        )

    def truth(self):
        """(out, lse) in float64."""
        return decode_oracle(
            self.q.float(),
            self.cache.float().nan_to_num(1e6),
            self.common.block_table_tensor,
            self.common.seq_lens,
            self.common.query_start_loc,
            causal=self.causal,
            softmax_scale=SCALE,
            q_scale=float(self.scales.get("q_scale", 1.0)),
            kv_scale=float(self.scales.get("kv_scale", 1.0)),
        )

    def check(self, found):
        """Demand the truth, within bf16's rounding."""
        out, lse = self.truth()
        torch.testing.assert_close(
            found.out.double(), out, rtol=0.02, atol=0.02, equal_nan=False
        )
        if found.lse is not None:
            torch.testing.assert_close(
                found.lse.double(), lse, rtol=1e-3, atol=1e-3, equal_nan=False
            )


def serve(problem, device, seq_lens, *, causal=True, **words):
    """Build a builder, run one step, check it; returns (builder, metadata, output)."""
    builder = backend.builder_cls(problem, device)
    step = Step(problem, device, seq_lens, causal=causal, **words)
    metadata, found = step.run(builder)
    step.check(found)
    return builder, metadata, found
