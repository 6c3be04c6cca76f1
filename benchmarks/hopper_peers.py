"""The Hopper kernel and its peers over one pool of pages, and how a run is timed."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
from hopper_points import Point

from mla_decode_triton.hopper.grid import choose_rows
from mla_decode_triton.hopper.launch import HopperStep
from mla_decode_triton.hopper.variants import Tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SCALE = 576**-0.5


class Bench:
    """The pool of pages, and the timer."""

    def __init__(self, pool_tokens: int) -> None:
        self.pool = torch.empty(
            pool_tokens // 64, 64, 576, dtype=torch.bfloat16, device="cuda"
        )
        for chunk in torch.split(self.pool.view(-1), 2**28):
            chunk.normal_()
        self._evict = torch.ones(512 * 2**20 // 4, device="cuda")

    def inputs(self, point: Point) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, Q, H, 576], table, lengths."""
        lengths = point.lengths()
        width = -(-max(lengths) // 64)
        # A ragged batch has more slots than the pool has pages: unused ones repeat.
        slots = torch.arange(point.requests * width, device="cuda")
        order = torch.randperm(self.pool.shape[0], device="cuda", dtype=torch.int32)
        pages = order[slots % len(order)]
        q = torch.randn(
            point.requests,
            point.query_len,
            point.heads,
            576,
            dtype=torch.bfloat16,
            device="cuda",
        )
        table = pages.view(point.requests, width).contiguous()
        return q, table, torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def time_us(self, run: Callable[[], Any], repeats: int) -> float:
        """Median of single runs, each after an eviction."""
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        events = [
            (event(enable_timing=True), event(enable_timing=True))
            for _ in range(repeats)
        ]
        for start, end in events:
            self._evict.sum()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        times: list[float] = [a.elapsed_time(b) for a, b in events]
        return statistics.median(times) * 1e3


def graphed(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A captured run and the output that its replay writes.

    The graph knows the buffers that `run` holds (schedules, scratch) by address alone:
    the replay keeps `run`, so that nothing else is allocated there.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # in torch
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay(_holds: Callable[[], Tensor] = run) -> None:
        graph.replay()

    return replay, kept


def make_step(
    point: Point, tuning: Tuning | None = None, rows: int | None = None
) -> HopperStep:
    """Buffers for one shape, and programs of so many rows; None: as a builder would."""
    units = torch.cuda.get_device_properties(0).multi_processor_count
    if rows is None:
        rows = choose_rows(
            point.heads * point.query_len, point.requests, max(point.lengths()), units
        )
    return HopperStep.alone(
        rows=rows,
        tuning=tuning or Tuning(),
        max_num_reqs=128,
        query_len=point.query_len,
        num_heads=point.heads,
        device=torch.device("cuda"),
        multiprocessors=units,
    )


def own(
    tuning: Tuning,
    cache: Tensor | None = None,
    kv_scale: Tensor | None = None,
    *,
    rows: int | None = None,
) -> Callable[..., Callable[[], Tensor]]:
    """This project's kernel, over the pool or another cache of its shape."""

    def make(
        bench: Bench, point: Point, q: Tensor, table: Tensor, lens: Tensor
    ) -> Callable[[], Tensor]:
        step = make_step(point, tuning, rows)
        flat = q.view(-1, point.heads, 576)
        longest = max(point.lengths())
        out = torch.empty(
            (flat.shape[0], point.heads, 512), dtype=q.dtype, device="cuda"
        )
        lse = torch.empty((flat.shape[0], point.heads), device="cuda")
        step.build(lens)

        def run() -> Tensor:
            if point.ragged:
                step.build(lens)
            step.forward(
                flat[..., :512],
                flat[..., 512:],
                bench.pool if cache is None else cache,
                table,
                lens,
                out,
                lse,
                softmax_scale=SCALE,
                causal=point.causal,
                kv_scale=kv_scale,
                max_seq_len=longest,
            )
            return out.view(*q.shape[:3], 512)

        return run

    return make


def flash_mla(
    bench: Bench, point: Point, q: Tensor, table: Tensor, lens: Tensor
) -> Callable[[], Tensor]:
    """FlashMLA; its schedule is made by the first call with a metadata object."""
    from vllm.third_party.flashmla.flash_mla_interface import (  # noqa: PLC0415 - a peer
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

    meta = get_mla_metadata()[0]
    cache = bench.pool.unsqueeze(2)

    def run() -> Tensor:
        schedule = get_mla_metadata()[0] if point.ragged else meta
        out: Tensor = flash_mla_with_kvcache(
            q,
            cache,
            table,
            lens,
            512,
            schedule,
            softmax_scale=SCALE,
            causal=point.causal,
        )[0]
        return out

    return run


def flash_attention(num_splits: int) -> Callable[..., Callable[[], Tensor]]:
    """FlashAttention-3 as vLLM calls it."""

    def make(
        bench: Bench, point: Point, q: Tensor, table: Tensor, lens: Tensor
    ) -> Callable[[], Tensor]:
        from vllm.vllm_flash_attn.flash_attn_interface import (  # noqa: PLC0415 - a peer
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )

        rows = q.view(-1, point.heads, 576)
        latent, rope = rows[..., :512].contiguous(), rows[..., 512:].contiguous()
        cache = bench.pool.unsqueeze(2)
        starts = (
            torch.arange(point.requests + 1, dtype=torch.int32, device="cuda")
            * point.query_len
        )
        longest = max(point.lengths())

        def schedule() -> Any:
            return get_scheduler_metadata(
                batch_size=point.requests,
                max_seqlen_q=point.query_len,
                max_seqlen_k=longest,
                num_heads_q=point.heads,
                num_heads_kv=1,
                headdim=64,
                cache_seqlens=lens,
                qkv_dtype=q.dtype,
                headdim_v=512,
                page_size=64,
                cu_seqlens_q=starts,
                causal=point.causal,
                num_splits=num_splits,
            )

        kept = schedule()

        def run() -> Tensor:
            out: Tensor = flash_attn_varlen_func(
                q=rope,
                k=cache[..., 512:],
                v=cache[..., :512],
                q_v=latent,
                max_seqlen_q=point.query_len,
                cu_seqlens_q=starts,
                max_seqlen_k=longest,
                seqused_k=lens,
                block_table=table,
                softmax_scale=SCALE,
                causal=point.causal,
                return_softmax_lse=True,
                fa_version=3,
                num_splits=num_splits,
                scheduler_metadata=schedule() if point.ragged else kept,
            )[0]
            return out.view(*q.shape[:3], 512)

        return run

    return make


def flashinfer(
    bench: Bench, point: Point, q: Tensor, table: Tensor, lens: Tensor
) -> Callable[[], Tensor]:
    """FlashInfer's fa3 wrapper, as a graph of a step would hold it.

    `plan` is 1.5 ms of host work that reads the lengths back, so it cannot be captured
    and is never timed. For uniform batches that is what the others get; for ragged ones,
    where the others' schedules are timed, it favours this peer.
    """
    from flashinfer.mla import (  # type: ignore[import-not-found] # may be absent # noqa: PLC0415 - a peer
        BatchMLAPagedAttentionWrapper,
        MLAPlanMetadata,
    )

    pages = (lens + 63) // 64
    used = torch.arange(table.shape[1], device="cuda") < pages.unsqueeze(1)
    starts = torch.arange(point.requests + 1, dtype=torch.int32, device="cuda")
    offsets = torch.zeros_like(starts)
    offsets[1:] = pages.cumsum(0)
    metadata = starts * point.query_len, offsets, table[used], lens
    reserved = [tensor.clone() for tensor in metadata]
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda"),
        use_cuda_graph=True,
        qo_indptr=reserved[0],
        kv_indptr=reserved[1],
        kv_indices=reserved[2],
        kv_len_arr=reserved[3],
        backend="fa3",
    )
    wrapper.plan(
        metadata=MLAPlanMetadata.csr(*metadata),
        num_heads=point.heads,
        head_dim_ckv=512,
        head_dim_kpe=64,
        page_size=64,
        causal=point.causal,
        sm_scale=SCALE,
        q_data_type=q.dtype,
        kv_data_type=bench.pool.dtype,
        query_layout="split",
        kv_cache_layout="split",
        lse_mode="base2",
    )
    rows = q.view(-1, point.heads, 576)
    out = torch.empty((rows.shape[0], point.heads, 512), dtype=q.dtype, device="cuda")
    lse = torch.empty((rows.shape[0], point.heads), device="cuda")

    def run() -> Tensor:
        wrapper.run(
            query=(rows[..., :512], rows[..., 512:]),
            kv_cache=(bench.pool[..., :512], bench.pool[..., 512:]),
            out=out,
            lse=lse,
            return_lse=True,
        )
        return out.view(*q.shape[:3], 512)

    return run


PEERS: dict[str, Callable[..., Callable[[], Any]]] = {
    "ours": own(Tuning()),
    "flash_mla": flash_mla,
    "fa3_32": flash_attention(32),
    "fa3_1": flash_attention(1),
    "flashinfer": flashinfer,
}


def available(bench: Bench) -> list[str]:
    """Peers that run here, on a point of no importance.

    A peer may be installed and still have no kernel here (FlashInfer builds its own at
    first use), which is a RuntimeError; ours has no such excuse.
    """
    point = Point(heads=16, query_len=1, requests=2, mean=256, causal=True)
    names = []
    for name, make in PEERS.items():
        try:
            make(bench, point, *bench.inputs(point))()
        except (ImportError, RuntimeError) as error:  # noqa: PERF203 - five times a run
            if name == "ours":
                raise
            print(f"left out: {name}: {error}")
        else:
            names.append(name)
    return names
