"""Poisoned decode steps: everything that must not be read holds a NaN or a bad page."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from mla_decode import CommonAttentionMetadata, DecodeProblem, DeviceInfo
from mla_decode.dtypes import torch_dtype
from mla_decode.reference.oracle import decode_oracle
from mla_decode_cuda_flashmla import backend

RELEASES = {
    "sched_meta": {"flash-mla": "2026.4"},
    "tile_metadata": {"flash-mla": "2025.4"},
    "sgl": {"sgl-flash-mla": "1.0.0"},
}
SCALE = 192**-0.5
TOLERANCE = {"bf16": 6e-3, "fp16": 8e-4, "fp8": 6e-2}


def assumed(release="sched_meta"):
    return DeviceInfo.assume("sm_90", libraries=RELEASES[release])


def problem_of(**fields):
    fields.setdefault("num_q_heads", 16)
    fields.setdefault("max_num_reqs", 8)
    fields.setdefault("max_model_len", 1024)
    if "q_dtype" in fields:
        fields.setdefault("kv_dtype", fields["q_dtype"])
        native = "fp16" if fields["q_dtype"] == "fp16" else "bf16"
        fields.setdefault("out_dtype", native)
        if fields["q_dtype"] == "fp8":  # has none: see test_limits
            fields["needs_lse"] = False
    return DecodeProblem(**fields)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One batch with its tensors."""

    common: CommonAttentionMetadata
    q: torch.Tensor
    kv: torch.Tensor
    scales: dict
    causal: bool = True

    def oracle(self):
        return decode_oracle(
            self.q,
            self.kv,
            self.common.block_table_tensor,
            self.common.seq_lens,
            self.common.query_start_loc,
            causal=self.causal,
            softmax_scale=SCALE,
        )

    def with_lens(self, lens):
        lens = torch.tensor(lens, dtype=torch.int32)
        return replace(
            self,
            common=replace(
                self.common, seq_lens=lens, max_seq_len=int(lens.max().item())
            ),
        )


def make_step(problem, lens, query_len=1, *, seed=0, slot=-1, capacity=None):
    """A step whose unused slots, page tails, spare pages and pad rows are poisoned."""
    torch.manual_seed(seed)
    device = DeviceInfo.assume("sm_90")
    room = capacity or max(lens)
    pages = [-(-max(length, capacity or 0) // 64) for length in lens]
    used = [-(-length // 64) for length in lens]
    order = torch.randperm(sum(pages)) + 1
    table = torch.full((len(lens), -(-room // 64) + 2), slot, dtype=torch.int32)[:, :-1]
    kv = torch.full((sum(pages) + 2, 64, 576), math.nan)
    given = iter(order.tolist())
    for request, count in enumerate(pages):
        for index in range(count):
            page = next(given)
            filled = 64 if capacity else min(64, lens[request] - 64 * index)
            kv[page, :filled] = torch.randn(filled, 576)
            if index < used[request] or capacity:
                table[request, index] = page
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    blocks = [query_len if any(lens[i:]) else 0 for i in range(len(lens))]
    starts[1:] = torch.tensor(blocks).cumsum(0)
    rows = len(lens) * query_len
    q = torch.randn(rows, problem.num_q_heads, 576)
    q[int(starts[-1]) :] = math.nan
    is_fp8 = problem.q_dtype == "fp8"
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(lens),
        num_actual_tokens=rows,
        max_query_len=query_len,
        max_seq_len=max(lens),
        block_table_tensor=table,
    )
    one = torch.ones(1)
    return Step(
        common=common,
        q=q.to(torch_dtype(problem.q_dtype, device)),
        kv=kv.to(torch_dtype(problem.kv_dtype, device)),
        scales={"q_scale": one, "kv_scale": one} if is_fp8 else {},
    )


def run(step, problem, device=None, **outputs):
    builder = backend.builder_cls(problem, device or assumed())
    metadata = builder.build(step.common)
    return backend.forward(
        step.q, step.kv, metadata, softmax_scale=SCALE, **step.scales, **outputs
    )


def check(output, step, dtype="bf16"):
    """Compare every row with the oracle; empty rows exactly."""
    out, lse = step.oracle()
    empty = lse.isinf()
    assert torch.equal(output.out[empty], torch.zeros_like(output.out[empty]))
    error = (output.out.double() - out).norm(dim=-1)[~empty]
    assert (error <= TOLERANCE[dtype] * out.norm(dim=-1)[~empty]).all()
    if output.lse is not None:
        assert (output.lse[empty] == -math.inf).all()
        torch.testing.assert_close(
            output.lse[~empty].double(), lse[~empty], rtol=0, atol=2e-4
        )


@pytest.fixture
def kit():
    """The helpers above, since test modules cannot import one another."""
    return Kit


class Kit:
    SCALE = SCALE
    RELEASES = RELEASES
    assumed = staticmethod(assumed)
    problem = staticmethod(problem_of)
    step = staticmethod(make_step)
    run = staticmethod(run)
    check = staticmethod(check)
