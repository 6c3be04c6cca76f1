"""Host time of the vLLM bridge per layer call, over the bare decoder.

    python benchmarks/vllm_bridge.py [--device cuda] [--rounds 200] [--json FILE]

It needs no vLLM: the bridge's `forward_mqa` is called as vLLM's attention layer calls it,
with the (nope, rope) query pair. Beside it `MLADecoder.run` gets the joined query and the
same plan, layer by layer in turn; the figure is the median of the differences. On a GPU
this is the time until the calls return, the device working behind. On a CPU the kernel
runs inside the call and its noise is larger than the bridge, so that the last two columns
are the figure there: the bridge with a decoder that does nothing, and the joining of the
pair alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from mla_decode import CommonAttentionMetadata, DecodeProblem, Mask, MLADecoder
from mla_decode_vllm.impl import BridgedDecode

if TYPE_CHECKING:
    from collections.abc import Callable

SCALE = 192**-0.5
CALLS = 20
LIMIT_US = 10.0
"""What the bridge may cost a layer call on an H200."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch of equal requests."""

    heads: int
    query_len: int
    requests: int
    causal: bool


SHAPES = tuple(
    Shape(heads=heads, query_len=query_len, requests=requests, causal=causal)
    for heads in (16, 128)
    for query_len, causal in ((1, True), (4, True), (7, False))
    for requests in (1, 16)
)

SMALL = tuple(shape for shape in SHAPES if shape.requests == 1)


class Setup:
    """A decoder, a plan, and the layer's tensors, as an engine holds them."""

    def __init__(self, shape: Shape, device: str, seq_len: int) -> None:
        query_len, requests = shape.query_len, shape.requests
        self.decoder = MLADecoder(
            DecodeProblem(
                num_q_heads=shape.heads,
                query_lens=frozenset({query_len}),
                masks=frozenset({Mask.CAUSAL if shape.causal else Mask.NON_CAUSAL}),
                max_num_reqs=requests,
                max_model_len=seq_len,
            ),
            device=device,
        )
        pages = -(-seq_len // 64)
        starts = torch.arange(requests + 1, dtype=torch.int32) * query_len
        table = torch.arange(requests * pages, dtype=torch.int32, device=device)
        self.plan = self.decoder.plan(
            CommonAttentionMetadata(
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=torch.full(
                    (requests,), seq_len, dtype=torch.int32, device=device
                ),
                num_reqs=requests,
                num_actual_tokens=requests * query_len,
                max_query_len=query_len,
                max_seq_len=seq_len,
                block_table_tensor=table.view(requests, pages),
                causal=shape.causal,
            )
        )
        tensor = {"dtype": torch.bfloat16, "device": device}
        self.cache = torch.zeros(requests * pages, 64, 576, **tensor)
        self.joined = torch.randn(requests * query_len, shape.heads, 576, **tensor)
        nope, rope = self.joined.split([512, 64], dim=-1)
        self.pair = (nope.contiguous(), rope.contiguous())
        self.impl = BridgedDecode()
        self.impl.scale = SCALE
        self.layer = SimpleNamespace(
            _q_scale=torch.ones((), device=device),
            _k_scale=torch.ones((), device=device),
        )
        self.metadata = self._metadata(self.decoder)
        idle = SimpleNamespace(
            problem=self.decoder.problem, run=lambda *_, **__: (self.joined, None)
        )
        self.idle = self._metadata(idle)

    def _metadata(self, decoder: Any) -> SimpleNamespace:
        return SimpleNamespace(decode=SimpleNamespace(decoder=decoder, plan=self.plan))

    def bare(self) -> None:
        """The decoder, the query joined."""
        self.decoder.run(self.joined, self.cache, self.plan, softmax_scale=SCALE)

    def bridged(self) -> None:
        """The bridge, as vLLM calls it."""
        self.impl.forward_mqa(self.pair, self.cache, self.metadata, self.layer)

    def bridge_alone(self) -> None:
        """The bridge, with a decoder that does nothing."""
        self.impl.forward_mqa(self.pair, self.cache, self.idle, self.layer)

    def join_alone(self) -> None:
        """The pair made one."""
        self.decoder.builder.join_query(*self.pair)


def per_call_us(call: Callable[[], None], *, wait: bool) -> float:
    """Host time of one of `CALLS` calls in a row, the device idle before."""
    if wait:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS * 1e6


def measure(shape: Shape, device: str, rounds: int, seq_len: int) -> dict[str, Any]:
    """Medians in microseconds a call; the two whole calls are timed in turn."""
    setup, wait = Setup(shape, device, seq_len), device.startswith("cuda")
    calls = (setup.bare, setup.bridged, setup.bridge_alone, setup.join_alone)
    for call in calls:
        per_call_us(call, wait=wait)
    times = [[per_call_us(call, wait=wait) for call in calls] for _ in range(rounds)]
    bare, bridged, alone, join = (
        statistics.median(column) for column in zip(*times, strict=True)
    )
    over = statistics.median(row[1] - row[0] for row in times)
    return vars(shape) | {
        "backend": setup.decoder.backend.name,
        "bare_us": bare,
        "bridged_us": bridged,
        "over_us": over,
        "bridge_alone_us": alone,
        "join_alone_us": join,
    }


def main() -> None:
    """Print a line a shape, and on a GPU whether the limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--rounds", type=int, default=200 if has_gpu else 5)
    parser.add_argument("--seq-len", type=int, default=4096 if has_gpu else 64)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        for shape in SHAPES if has_gpu else SMALL:
            rows.append(measure(shape, asked.device, asked.rounds, asked.seq_len))
            print(
                "{backend:12} H={heads:<4} Q={query_len} B={requests:<3} "
                "bare {bare_us:8.1f}  bridged {bridged_us:8.1f}  over {over_us:7.1f}  "
                "bridge alone {bridge_alone_us:5.1f}  join alone {join_alone_us:6.1f} us"
                "".format(**rows[-1])
            )
    if asked.device.startswith("cuda"):
        worst = max(row["over_us"] for row in rows)
        print(f"worst {worst:.1f} us a layer call; limit {LIMIT_US:.0f}")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
