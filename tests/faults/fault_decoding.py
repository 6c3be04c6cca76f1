"""One decode step through `MLADecoder`, on every backend that a CPU stands in for.

Whatever must not be read is NaN, or a page that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mla_decode import CommonAttentionMetadata, DecodeProblem, DeviceInfo, MLADecoder
from mla_decode.dtypes import torch_dtype
from mla_decode.reference.oracle import decode_oracle

SCALE = 192**-0.5
DEVICES = {
    "reference": DeviceInfo.assume("cpu"),
    "rocm_aiter": DeviceInfo.assume("gfx950"),
    "cuda_flashmla": DeviceInfo.assume("sm_90"),
    "triton_mla": DeviceInfo.assume("gfx942"),
}
"""Reference, two simulated libraries, and kernels in Triton's interpreter."""
WAYS = tuple(DEVICES)
QUICK = ("reference", "rocm_aiter", "cuda_flashmla")
"""Those that cost milliseconds a step."""
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp8": 6e-2}


def problem_of(**fields):
    """16 heads over bf16 pages of 64: what every backend serves."""
    fields.setdefault("num_q_heads", 16)
    fields.setdefault("max_num_reqs", 8)
    fields.setdefault("max_model_len", 256)
    return DecodeProblem(**fields)


def decoder_of(way, problem, **options):
    """A decoder over one backend, named as a user names it."""
    device = options.pop("device", DEVICES[way])
    return MLADecoder(problem, way, device=device, **options)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One layer's tensors of one batch."""

    problem: DecodeProblem
    common: CommonAttentionMetadata
    q: torch.Tensor
    kv: torch.Tensor
    scales: dict

    def on(self, decoder, *, q=None, scale=SCALE, **outputs):
        """Plan and run; returns the output."""
        plan = decoder.plan(self.common)
        return self.run(decoder, plan, q=q, scale=scale, **outputs)

    def run(self, decoder, plan, *, q=None, scale=SCALE, **outputs):
        """Run over metadata that was built before."""
        query = self.q if q is None else q
        return decoder.run(
            query, self.kv, plan, softmax_scale=scale, **self.scales, **outputs
        )

    def truth(self, scale=SCALE):
        """(out, lse) in float64."""
        return decode_oracle(
            self.q,
            self.kv,
            self.common.block_table_tensor,
            self.common.seq_lens,
            self.common.query_start_loc_cpu,
            causal=bool(self.common.causal),
            softmax_scale=scale,
            **{name: float(value) for name, value in self.scales.items()},
        )

    def check(self, output, *, scale=SCALE):
        """Demand the truth of every row, and of empty rows exactly (0, -inf)."""
        out, lse = self.truth(scale)
        empty = lse.isinf()
        assert not output.out[empty].any()
        found, wanted = output.out.double()[~empty], out[~empty]
        dtypes = {self.problem.q_dtype, self.problem.kv_dtype, self.problem.out_dtype}
        most = max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
        error = (found - wanted).norm(dim=-1)
        assert (error <= most * wanted.norm(dim=-1)).all(), float(error.max())
        if output.lse is not None:
            assert (output.lse[empty] == -torch.inf).all()
            torch.testing.assert_close(
                output.lse.double()[~empty], lse[~empty], atol=2e-3, rtol=1e-5
            )

    def with_common(self, **changes):
        """The same tensors under another batch."""
        return replace(self, common=replace(self.common, **changes))


def step_of(
    problem,
    seq_lens,
    *,
    query_len=1,
    causal=True,
    device=DEVICES["reference"],
    seed=0,
    cache=None,
    pages=None,
):
    """Draw a step. A length of 0 at the tail is a pad request.

    Args:
        problem: What the decoder was made for.
        seq_lens: Keys of each request.
        query_len: Q.
        causal: The mask.
        device: Decides which fp8 it is.
        seed: Of the drawn numbers.
        cache: Filled in place of one that is made here.
        pages: The pages that requests take, in order; shuffled by default.
    """
    generator = torch.Generator().manual_seed(seed)
    size = problem.page_size
    counts = [-(-length // size) for length in seq_lens]
    order = pages or torch.randperm(sum(counts) + 2, generator=generator).tolist()
    table = torch.full((len(seq_lens), max([*counts, 1]) + 1), -1, dtype=torch.int32)
    dtype = torch_dtype(problem.kv_dtype, device)
    if cache is None:
        total, stride = sum(counts) + 2, problem.page_stride
        flat = torch.full((total * stride,), torch.nan).to(dtype)
        cache = flat.as_strided((total, size, 576), (stride, 576, 1))
    given = iter(order)
    for request, length in enumerate(seq_lens):
        for slot in range(counts[request]):
            page = table[request, slot] = next(given)
            rows = min(size, length - slot * size)
            drawn = torch.randn(rows, 576, generator=generator)
            cache[int(page), :rows] = drawn.to(dtype)
    live = len(seq_lens) - next(
        (n for n, length in enumerate(reversed(seq_lens)) if length), len(seq_lens)
    )
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32).clamp(max=live)
    starts *= query_len
    rows = len(seq_lens) * query_len
    q = torch.randn(rows, problem.num_q_heads, 576, generator=generator)
    q[live * query_len :] = torch.nan
    scales = {}
    for name, kind in (("q_scale", problem.q_dtype), ("kv_scale", problem.kv_dtype)):
        if kind == "fp8":
            scales[name] = torch.tensor([0.75])
    return Step(
        problem=problem,
        common=CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=len(seq_lens),
            num_actual_tokens=rows,
            max_query_len=query_len,
            max_seq_len=max(seq_lens),
            block_table_tensor=table,
            causal=causal,
        ),
        q=q.to(torch_dtype(problem.q_dtype, device)),
        kv=cache,
        scales=scales,
    )
