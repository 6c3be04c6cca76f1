"""Time triton_mla and its peers on this machine's NVIDIA GPU.

Pages are drawn at random from a pool larger than L2, which is evicted before each
repetition; a step is captured in a graph and replayed; medians over events, every figure
taken twice. Peers are used where they can be imported: FlashMLA and vLLM's Triton kernel,
both as vLLM 0.25.1 ships them, with its module names.

    python benchmarks/triton_mla.py --out DIR [--quick]
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton
from batches import SCALE, uniform_batch

from mla_decode import DecodeProblem, Mask, detect_device
from mla_decode_triton import chosen_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mla_decode import CommonAttentionMetadata

backend = chosen_backend("portable")
PAGE = 64
POOL_TOKENS = 4 << 20
BYTES_PER_S = 4.3e12
"""Measured copy bandwidth of an H200."""
FLOPS = 790e12
"""Measured bf16 rate of an 8192 cubed product on an H200."""
POINTS = (
    # H, Q, B, S
    (16, 1, 1, 1024),
    (16, 1, 1, 4096),
    (16, 1, 1, 16384),
    (16, 1, 1, 65536),
    (16, 1, 16, 4096),
    (16, 1, 16, 16384),
    (16, 1, 64, 16384),
    (16, 1, 128, 4096),
    (16, 4, 1, 4096),
    (16, 4, 16, 4096),
    (16, 4, 16, 16384),
    (16, 4, 64, 16384),
    (16, 8, 1, 16384),
    (16, 8, 16, 16384),
    (16, 8, 64, 16384),
    (128, 1, 1, 16384),
    (128, 1, 16, 4096),
    (128, 1, 64, 4096),
    (128, 4, 16, 16384),
    (128, 8, 64, 4096),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One uniform batch over random pages."""

    heads: int
    query_len: int
    num_reqs: int
    seq_len: int
    kv_dtype: str
    causal: bool
    q: torch.Tensor
    pool: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def roofline_us(self) -> float:
        """The larger of the time to read the KV once and to multiply."""
        tokens = self.num_reqs * self.seq_len
        width = 576 * (1 if self.kv_dtype == "fp8" else 2)
        flops = 2 * tokens * self.heads * self.query_len * 1088
        return max(tokens * width / BYTES_PER_S, flops / FLOPS) * 1e6


class Bench:
    """The pool, the L2 eviction and the clock."""

    def __init__(self) -> None:
        self.pools: dict[str, torch.Tensor] = {}
        self.evictor = torch.ones(128 << 20, device="cuda")

    def case(
        self,
        point: tuple[int, int, int, int],
        kv_dtype: str = "bf16",
        *,
        causal: bool = False,
    ) -> Case:
        """Draw a batch."""
        heads, query_len, num_reqs, seq_len = point
        pool = self._pool(kv_dtype)
        width = -(-seq_len // PAGE)
        drawn = [
            torch.randperm(pool.shape[0], device="cuda")
            for _ in range(-(-num_reqs * width // pool.shape[0]))
        ]
        table = torch.cat(drawn)[: num_reqs * width].int().view(num_reqs, width)
        shape = (num_reqs * query_len, heads, 576)
        return Case(
            heads=heads,
            query_len=query_len,
            num_reqs=num_reqs,
            seq_len=seq_len,
            kv_dtype=kv_dtype,
            causal=causal,
            q=torch.randn(shape, dtype=torch.bfloat16, device="cuda"),
            pool=pool,
            table=table.contiguous(),
            seq_lens=torch.full((num_reqs,), seq_len, dtype=torch.int32, device="cuda"),
        )

    def time_us(self, step: Callable[[], object]) -> float:
        """Median of a graph's replays with a cold L2."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        first = self._replay(graph, 1)[0]
        return statistics.median(
            self._replay(graph, int(max(5, min(30, 12000 / max(first, 1)))))
        )

    def _replay(self, graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
        pairs = []
        for _ in range(times):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            self.evictor.sum()
            begin.record()
            graph.replay()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]

    def _pool(self, kv_dtype: str) -> torch.Tensor:
        if kv_dtype not in self.pools:
            shape = (POOL_TOKENS // PAGE, PAGE, 576)
            pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for chunk in pool.view(-1).split(1 << 28):
                chunk.normal_()
            if kv_dtype == "fp8":
                pool = pool.to(torch.float8_e4m3fn)
            self.pools[kv_dtype] = pool
        return self.pools[kv_dtype]


def common_of(case: Case) -> CommonAttentionMetadata:
    """The case in the contract's words."""
    return uniform_batch(
        case.table,
        case.seq_lens,
        query_len=case.query_len,
        max_seq_len=case.seq_len,
        causal=case.causal,
    )


def problem_of(case: Case, *, graphs: bool = False) -> DecodeProblem:
    """The problem that the case is one step of."""
    return DecodeProblem(
        num_q_heads=case.heads,
        kv_dtype=case.kv_dtype,
        page_size=PAGE,
        query_lens=frozenset({case.query_len}),
        masks=frozenset(Mask),
        graphs=graphs,
        max_num_reqs=case.num_reqs,
        max_model_len=case.seq_len,
    )


def ours(case: Case) -> Callable[[], object]:
    """A forward of triton_mla."""
    builder = backend.builder_cls(problem_of(case), detect_device())
    metadata = builder.build(common_of(case))
    out = torch.empty(case.q.shape[0], case.heads, 512, dtype=torch.bfloat16).cuda()
    scale = torch.full((1,), 0.5, device="cuda") if case.kv_dtype == "fp8" else None
    return lambda: backend.forward(
        case.q, case.pool, metadata, softmax_scale=SCALE, kv_scale=scale, out=out
    )


def flashmla(case: Case) -> Callable[[], object]:
    """FlashMLA's dense decode, the schedule made before."""
    library = import_module("vllm.third_party.flashmla.flash_mla_interface")
    schedule, _ = library.get_mla_metadata()
    q = case.q.view(case.num_reqs, case.query_len, case.heads, 576)
    return lambda: library.flash_mla_with_kvcache(
        q,
        case.pool.view(-1, PAGE, 1, 576),
        case.table,
        case.seq_lens,
        512,
        schedule,
        softmax_scale=SCALE,
        causal=case.causal,
    )


def vllm_triton(case: Case) -> Callable[[], object]:
    """VLLM's Triton MLA: a block is so many rows of their own."""
    library = import_module("vllm.v1.attention.ops.triton_decode_attention")
    rows = case.q.shape[0]
    splits = min(264, 1 << (max(1, case.seq_len // 512) - 1).bit_length())
    if rows * case.heads * splits * 513 >= 1 << 31:
        raise MemoryError("its 32-bit offsets overflow here")
    lengths = case.seq_lens.repeat_interleave(case.query_len)
    table = case.table.repeat_interleave(case.query_len, 0)
    logits = torch.empty(rows, case.heads, splits, 513, device="cuda")
    out = torch.empty(rows, case.heads, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(rows, case.heads, dtype=torch.bfloat16, device="cuda")
    one = torch.ones((), device="cuda")
    cache = case.pool.view(-1, PAGE, 1, 576)
    return lambda: library.decode_attention_fwd(
        *(case.q, cache, cache[..., :512], out, lse, table, lengths, logits),
        *(splits, SCALE, PAGE),
        k_scale=one,
        v_scale=one,
        is_mla=True,
    )


PEERS = {"triton_mla": ours, "flashmla": flashmla, "vllm_triton": vllm_triton}


def measure(
    bench: Bench, points: tuple[tuple[int, int, int, int], ...], only: list[str]
) -> Iterator[list[object]]:
    """Every peer at every point, twice; our own over an fp8 cache too."""
    for point in points:
        for name, kv_dtype in (
            ("triton_mla", "bf16"),
            ("triton_mla", "fp8"),
            ("flashmla", "bf16"),
            ("vllm_triton", "bf16"),
        ):
            if name not in only or (kv_dtype == "fp8" and point[0] * point[1] > 64):
                continue
            case = bench.case(point, kv_dtype)
            try:
                step = PEERS[name](case)
                times = [bench.time_us(step) for _ in range(2)]
            except (ImportError, MemoryError) as absent:
                print(f"{name} {point}: {absent}", file=sys.stderr)
                continue
            yield [
                *(name, kv_dtype, *point),
                *(f"{us:.2f}" for us in times),
                f"{case.roofline_us / min(times):.3f}",
            ]


def measure_host(bench: Bench) -> Iterator[str]:
    """Host microseconds of a build and of a forward, eager, no synchronisation."""
    for graphs in (False, True):
        for point in ((16, 4, 4, 1024), (128, 1, 64, 1024)):
            case = bench.case(point)
            builder = backend.builder_cls(
                problem_of(case, graphs=graphs), detect_device()
            )
            common = common_of(case)
            out = torch.empty(case.q.shape[0], case.heads, 512).bfloat16().cuda()
            pair = case.q[..., :512].contiguous(), case.q[..., 512:].contiguous()
            for form, q in (("joined", case.q), ("pair", pair)):
                builds: list[float] = []
                forwards: list[float] = []
                for repetition in range(400):
                    if repetition == 200:  # the first half warms the host up
                        builds, forwards = [], []
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                    start = time.perf_counter()
                    metadata = builder.build(common)
                    built = time.perf_counter()
                    for _layer in range(5):
                        began = time.perf_counter()
                        backend.forward(
                            q, case.pool, metadata, softmax_scale=SCALE, out=out
                        )
                        forwards.append(time.perf_counter() - began)
                    builds.append(built - start)
                    torch.cuda.set_sync_debug_mode("default")
                yield (
                    f"host H{point[0]} Q{point[1]} B{point[2]} {form} graphs={graphs}: "
                    f"build {statistics.median(builds) * 1e6:.1f} us, "
                    f"forward {statistics.median(forwards) * 1e6:.1f} us"
                )


def main() -> None:
    """Measure, write the CSV, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--quick", action="store_true", help="every fourth point")
    parser.add_argument("--only", action="append", choices=PEERS, help="repeatable")
    options = parser.parse_args()
    print(
        f"# {datetime.now(timezone.utc):%Y-%m-%d} {torch.cuda.get_device_name()} "
        f"torch {torch.__version__} triton {triton.__version__} "
        f"python {platform.python_version()}"
    )
    bench = Bench()
    for line in measure_host(bench):
        print(line, flush=True)
    header = ["kernel", "kv_dtype", "H", "Q", "B", "S", "us", "us_again", "roofline"]
    with (options.out / "triton_mla.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        print(" ".join(header))
        points = POINTS[:: 4 if options.quick else 1]
        for row in measure(bench, points, options.only or list(PEERS)):
            writer.writerow(row)
            print(" ".join(map(str, row)), flush=True)


if __name__ == "__main__":
    main()
