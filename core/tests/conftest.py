"""Steps to decode, poisoned wherever the contract says that nobody reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings

from mla_decode import CommonAttentionMetadata, DecodeProblem, DeviceInfo, Mask
from mla_decode.backend import BackendBase, Cost
from mla_decode.batch import QueryLenSupport
from mla_decode.builder import GraphSupport, MLADecodeMetadataBuilder
from mla_decode.capability import Capability, CapabilityRow, Feature, Support
from mla_decode.metadata import DecodeMetadata
from mla_decode.reference.oracle import decode_oracle

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")  # a busy machine is no failure

CPU = DeviceInfo.assume("cpu")
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
BAD_SLOTS = (-1, -(2**31), 2_147_480_000)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step's tensors, and the truth of it."""

    problem: DecodeProblem
    common: CommonAttentionMetadata
    q: torch.Tensor
    kv_cache: torch.Tensor
    softmax_scale: float
    q_scale: torch.Tensor | None
    kv_scale: torch.Tensor | None

    @property
    def arguments(self):
        """Keyword arguments of `forward`."""
        return {
            "softmax_scale": self.softmax_scale,
            "q_scale": self.q_scale,
            "kv_scale": self.kv_scale,
        }

    def truth(self):
        """Output and LSE in float64, from the oracle."""
        return decode_oracle(
            self.q,
            self.kv_cache,
            self.common.block_table_tensor,
            self.common.seq_lens,
            self.common.query_start_loc_cpu,
            causal=bool(self.common.causal),
            softmax_scale=self.softmax_scale,
            q_scale=1.0 if self.q_scale is None else float(self.q_scale),
            kv_scale=1.0 if self.kv_scale is None else float(self.kv_scale),
        )

    def with_common(self, **changes):
        """The same step with another field of its batch."""
        return replace(self, common=replace(self.common, **changes))


def _tables(seq_lens, page_size, generator, *, shared):
    """Pages of each request, shuffled; with shared, full pages of the first are all's."""
    counts = [-(-seq_len // page_size) for seq_len in seq_lens]
    fresh = iter(torch.randperm(sum(counts) + 3, generator=generator).tolist())
    rows = []
    for seq_len, count in zip(seq_lens, counts, strict=True):
        common = 0
        if shared and rows:
            common = min(seq_len, seq_lens[0]) // page_size
        rows.append(rows[0][:common] if common else [])
        rows[-1] = [*rows[-1], *(next(fresh) for _ in range(count - common))]
    return rows, sum(counts) + 3


def _cache(rows, num_pages, seq_lens, page_size, dtype, generator, page_gap):
    used = torch.zeros((num_pages, page_size), dtype=torch.bool)
    for pages, seq_len in zip(rows, seq_lens, strict=True):
        for number, page in enumerate(pages):
            used[page, : min(page_size, seq_len - number * page_size)] = True
    dense = torch.randn((num_pages, page_size, 576), generator=generator).to(dtype)
    is_fp8 = dtype == DTYPES["fp8"]
    raw = dense.view(torch.uint8) if is_fp8 else dense
    poison = 0x7F if is_fp8 else torch.nan
    raw[~used] = poison
    if page_gap:
        stride = page_size * 576 + page_gap
        room = torch.full((num_pages * stride,), poison, dtype=raw.dtype)
        strided = room.as_strided(raw.shape, (stride, 576, 1))
        strided.copy_(raw)
        raw = strided
    return raw.view(dtype) if is_fp8 else raw


def build_step(
    *,
    seq_lens=(5,),
    query_lens=None,
    query_len=1,
    pads=0,
    causal=True,
    heads=2,
    page_size=16,
    q_dtype="bf16",
    kv_dtype="bf16",
    out_dtype="bf16",
    needs_lse=True,
    shared=False,
    page_gap=0,
    softmax_scale=192**-0.5,
    seed=0,
    **problem_fields,
):
    """A step of these lengths; everything that must not be read is poison."""
    generator = torch.Generator().manual_seed(seed)
    blocks = list(query_lens or [query_len] * len(seq_lens)) + [0] * pads
    lens = list(seq_lens) + [0] * pads
    longest = max(blocks) or query_len
    is_uniform = set(blocks) <= {0, longest}
    tokens = len(lens) * longest if is_uniform else sum(blocks) + pads
    rows, num_pages = _tables(lens, page_size, generator, shared=shared)
    width = max(map(len, rows)) + 2
    table = torch.tensor(
        [[*pages, *(BAD_SLOTS * width)[: width - len(pages)]] for pages in rows],
        dtype=torch.int32,
    )
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(blocks).cumsum(0)
    q = torch.randn((tokens, heads, 576), generator=generator).to(DTYPES[q_dtype])
    pad_rows = q[int(starts[-1]) :]
    (pad_rows.view(torch.uint8) if q_dtype == "fp8" else pad_rows).fill_(
        0x7F if q_dtype == "fp8" else torch.nan
    )
    is_scaled = "fp8" in {q_dtype, kv_dtype}
    problem = DecodeProblem(
        **{
            "num_q_heads": heads,
            "q_dtype": q_dtype,
            "kv_dtype": kv_dtype,
            "out_dtype": out_dtype,
            "page_size": page_size,
            "query_lens": frozenset(blocks) - {0} or frozenset({longest}),
            "masks": frozenset(Mask),
            "needs_lse": needs_lse,
            "kv_page_stride": page_size * 576 + page_gap if page_gap else None,
            "max_num_reqs": len(lens),
            "max_model_len": max(*lens, longest, 1) + 7,
            **problem_fields,
        }
    )
    return Step(
        problem=problem,
        common=CommonAttentionMetadata(
            query_start_loc=starts.clone(),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            num_reqs=len(lens),
            num_actual_tokens=tokens,
            max_query_len=longest,
            max_seq_len=max(lens),
            block_table_tensor=table,
            slot_mapping=torch.arange(tokens),
            causal=causal,
        ),
        q=q,
        kv_cache=_cache(
            rows, num_pages, lens, page_size, DTYPES[kv_dtype], generator, page_gap
        ),
        softmax_scale=softmax_scale,
        q_scale=torch.tensor([0.75]) if is_scaled and q_dtype == "fp8" else None,
        kv_scale=torch.tensor([1.25]) if is_scaled and kv_dtype == "fp8" else None,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class HandedMetadata(DecodeMetadata):
    """What core handed to `_build_decode`, kept to be looked at."""

    handed: dict
    decode_causal: bool
    decode_query_len: int


class PlainBuilder(MLADecodeMetadataBuilder):
    """An adapter's builder without any need of its own."""

    query_len_support = QueryLenSupport.UNIFORM
    graph_support = GraphSupport.UNIFORM_BATCH
    supports_non_causal_multi_token_decode = True
    supports_non_causal_multi_token_dcp = True

    def _build_decode(
        self,
        block_table_tensor,
        seq_lens_device,
        max_seq_len,
        query_start_loc_cpu,
        query_start_loc_device,
        num_decode_tokens,
        dcp_tot_seq_lens_device,
    ):
        return HandedMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_seq_len=max_seq_len,
            num_reqs=seq_lens_device.shape[0],
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            handed={"query_start_loc_cpu": query_start_loc_cpu},
            decode_causal=self._decode_causal,
            decode_query_len=self._decode_query_len,
        )


class PlainBackend(BackendBase):
    """A backend that fills its outputs with the number of its call's rows."""

    name = "plain"
    capability = Capability(
        rows=tuple(
            CapabilityRow(
                arch=arch,
                dtypes=frozenset({("bf16", "bf16"), ("bf16", "fp8")}),
                out_dtypes=frozenset({"bf16"}),
                page_sizes=frozenset({16, 64}),
                num_q_heads=range(1, 129),
                query_lens={Mask.CAUSAL: range(1, 9), Mask.NON_CAUSAL: range(2, 9)},
                features={Feature.LSE: Support.YES, Feature.GRAPHS: Support.YES},
            )
            for arch in ("cpu", "sm_90", "gfx942")
        )
    )

    @property
    def builder_cls(self):
        return PlainBuilder

    def supports_non_causal(self, device):
        return self.capability.row(device.arch) is not None

    def cost(self, problem, device):
        del device
        rows = problem.max_query_len * problem.num_q_heads
        return Cost(kv_walks=1, rows=rows, launches=1, workspace_bytes=4 * rows)

    def evidence(self, device):
        del device
        return "nowhere"

    def _forward(self, call):
        self.last_call = call
        call.out.fill_(call.q.shape[0])
        if call.lse is not None:
            call.lse.fill_(call.q.shape[0])


@pytest.fixture(scope="session")
def cpu():
    return CPU


@pytest.fixture(scope="session")
def make_step():
    return build_step


@pytest.fixture(scope="session")
def plain_builder():
    return PlainBuilder


@pytest.fixture
def plain_backend():
    return PlainBackend()


@pytest.fixture(scope="session")
def plain_backend_cls():
    return PlainBackend
