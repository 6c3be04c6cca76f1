"""Every variant on a Hopper GPU, against float64 on the same poisoned batches."""

import hopper_batches as batches
import pytest
import torch

pytestmark = pytest.mark.cuda


LENS = [9000, 300, 0, 4, 64, 4097, 129, 0]


def _run(step, q, cache, table, lens, *, causal, kv_scale=None):
    rows = q.shape[0] * step.query_len
    q = q.view(rows, step.num_heads, 576)
    nan = float("nan")
    out = torch.full((rows, step.num_heads, 512), nan, dtype=q.dtype, device="cuda")
    lse = torch.full((rows, step.num_heads), nan, device="cuda")
    step.build(lens)
    step.forward(
        q[..., :512],
        q[..., 512:],
        cache,
        table,
        lens,
        out,
        lse,
        softmax_scale=batches.SCALE,
        causal=causal,
        kv_scale=kv_scale,
    )
    return out, lse


def _step(query_len, num_heads, rows=None):
    from mla_decode_triton.hopper.launch import HopperStep

    properties = torch.cuda.get_device_properties(0)
    return HopperStep.alone(
        max_num_reqs=64,
        query_len=query_len,
        num_heads=num_heads,
        rows=rows,
        device=torch.device("cuda"),
        multiprocessors=properties.multi_processor_count,
    )


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("query_len", "num_heads", "dtype", "rows"),
    [
        (1, 16, "bf16", None),
        (3, 5, "fp16", None),
        (2, 16, "fp8", None),
        (4, 16, "bf16", None),
        (4, 16, "fp8", None),
        (1, 128, "fp8", None),
        (3, 30, "fp16", None),
        (4, 128, "bf16", None),
        (1, 128, "bf16", 16),
        (3, 30, "fp16", 16),
        (4, 30, "fp8", 16),
    ],
)
def test_agrees_with_float64(query_len, num_heads, dtype, rows, causal, page):
    q_dtype = torch.float16 if dtype == "fp16" else torch.bfloat16
    q, cache, table = batches.make_batch(
        LENS, query_len, num_heads, page, q_dtype, seed=page
    )
    truth, kv_scale = cache, None
    if dtype == "fp8":
        cache = cache.to(torch.float8_e4m3fn)
        truth = cache.double() * batches.KV_SCALE
        kv_scale = torch.tensor([batches.KV_SCALE]).cuda()
    expected = batches.oracle(
        q, truth, table, LENS, query_len, num_heads, causal=causal
    )
    lens = torch.tensor(LENS, dtype=torch.int32).cuda()
    step = _step(query_len, num_heads, rows)
    inputs = (q.cuda(), cache.cuda(), table.cuda(), lens)
    out, lse = _run(step, *inputs, causal=causal, kv_scale=kv_scale)
    shape = (len(LENS), query_len * num_heads)
    batches.check((out.cpu().view(*shape, 512), lse.cpu().view(shape)), expected)
    again = _run(step, *inputs, causal=causal, kv_scale=kv_scale)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


def test_warps_raise_peaks_each_by_itself():
    page, query_len, num_heads, lens = 64, 4, 16, [640, 64]
    q, cache, table = batches.make_batch(
        lens, query_len, num_heads, page, torch.bfloat16
    )
    rises = [0, 3, 12, 0, 40, 45, 90, 91, 20, 150]
    batches.raise_scores(q, cache, table, [0, 8, 15, 33, 34], rises)
    expected = batches.oracle(q, cache, table, lens, query_len, num_heads, causal=False)
    step = _step(query_len, num_heads)
    on_device = torch.tensor(lens, dtype=torch.int32).cuda()
    out, lse = _run(step, q.cuda(), cache.cuda(), table.cuda(), on_device, causal=False)
    shape = (len(lens), query_len * num_heads)
    batches.check((out.cpu().view(*shape, 512), lse.cpu().view(shape)), expected)


def test_a_captured_step_follows_lengths_changed_in_place():
    page, query_len, num_heads = 64, 4, 16
    longer, shorter = [4096, 70, 640, 1500], [64, 4096, 0, 300]
    q, cache, table = batches.make_batch(
        [4096] * 4, query_len, num_heads, page, torch.bfloat16
    )
    step = _step(query_len, num_heads)
    lens = torch.tensor(longer, dtype=torch.int32).cuda()
    inputs = (q.cuda(), cache.cuda(), table.cuda(), lens)
    _run(step, *inputs, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = _run(step, *inputs, causal=True)
    for now in (longer, shorter):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = batches.oracle(
            q, cache, table, now, query_len, num_heads, causal=True
        )
        shape = (4, query_len * num_heads)
        batches.check((out.cpu().view(*shape, 512), lse.cpu().view(shape)), expected)


@pytest.mark.parametrize(("query_len", "num_heads"), [(1, 16), (4, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_direct_launch_gives_the_bits_of_the_front_door(
    monkeypatch, query_len, num_heads, dtype
):
    from triton.runtime.jit import JITFunction

    q, cache, table = batches.make_batch(LENS, query_len, num_heads, 64, torch.bfloat16)
    lens = torch.tensor(LENS, dtype=torch.int32).cuda()
    is_fp8 = dtype is torch.float8_e4m3fn
    words = {
        "causal": True,
        "kv_scale": torch.tensor([batches.KV_SCALE]).cuda() if is_fp8 else None,
    }
    inputs = [q.cuda(), cache.to(dtype).cuda(), table.cuda(), lens]
    step = _step(query_len, num_heads)
    expected = _run(step, *inputs, **words)
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", None)  # the front door is shut
        found = _run(step, *inputs, **words)
        room = torch.empty(table.numel() + 1, dtype=torch.int32, device="cuda")[1:]
        inputs[2] = room.view(table.shape).copy_(table)  # at no multiple of 16
        odd = _run(step, *inputs, **words)
    for outputs in (found, odd):
        assert all(map(torch.equal, outputs, expected))
