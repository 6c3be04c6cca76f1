"""How the reference backend compares with torch's attention over gathered KV, on a CPU.

The peer gathers each request's pages into one tensor and calls
`scaled_dot_product_attention` on it with the block's tokens and heads folded into one
head's rows. It is given both ways to say that the value is the first 512 numbers of the
key, and the faster of them counts: a narrower value (torch then leaves its fused
kernel), or the whole key as the value, the rope part thrown away.

Calls are timed in interleaved pairs, so that both meet the same machine, and medians
are compared.

    python benchmarks/reference_cpu.py [--repeats 15] [--threads 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from mla_decode import CommonAttentionMetadata, DecodeProblem, Mask, MLADecoder
from mla_decode.reference.oracle import decode_oracle

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_REQS, SEQ_LEN, NUM_HEADS, PAGE_SIZE = 8, 4096, 16, 64
SOFTMAX_SCALE = 192**-0.5
TARGET = 1.3


def main() -> None:
    """Print one line a block length: medians in milliseconds, and their ratio."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--repeats", type=int, default=15, help="pairs to time")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for query_len in (1, 8):
        found = compare(query_len, options.repeats)
        if options.json:
            print(json.dumps(found))
        else:
            print(
                f"Q={query_len}: reference {found['reference_ms']:.1f} ms, "
                f"attention over gathered KV {found['peer_ms']:.1f} ms "
                f"({found['peer']}), ratio {found['ratio']:.2f} "
                f"(target {TARGET}), relative error {found['relative_error']:.1e}"
            )


def compare(query_len: int, repeats: int) -> dict[str, Any]:
    """Time both on one batch; the ratio is above 1 where the reference is faster."""
    width = SEQ_LEN // PAGE_SIZE
    cache = torch.randn(NUM_REQS * width, PAGE_SIZE, 576).bfloat16()
    table = torch.randperm(NUM_REQS * width, dtype=torch.int32).view(NUM_REQS, width)
    q = torch.randn(NUM_REQS * query_len, NUM_HEADS, 576).bfloat16()
    starts = torch.arange(NUM_REQS + 1, dtype=torch.int32) * query_len
    lens = torch.full((NUM_REQS,), SEQ_LEN, dtype=torch.int32)
    decoder = MLADecoder(
        DecodeProblem(
            num_q_heads=NUM_HEADS,
            page_size=PAGE_SIZE,
            query_lens=frozenset({query_len}),
            masks=frozenset({Mask.NON_CAUSAL}),
            max_num_reqs=NUM_REQS,
            max_model_len=SEQ_LEN,
        ),
        "reference",
        device="cpu",
    )
    plan = decoder.plan(
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            num_reqs=NUM_REQS,
            num_actual_tokens=NUM_REQS * query_len,
            max_query_len=query_len,
            max_seq_len=SEQ_LEN,
            block_table_tensor=table,
            causal=False,
        )
    )

    def reference() -> torch.Tensor:
        return decoder.run(q, cache, plan, softmax_scale=SOFTMAX_SCALE).out

    def peer(value_width: int) -> torch.Tensor:
        keys = cache[table].view(NUM_REQS, 1, SEQ_LEN, 576)
        rows = q.view(NUM_REQS, 1, query_len * NUM_HEADS, 576)
        out = scaled_dot_product_attention(
            rows, keys, keys[..., :value_width], scale=SOFTMAX_SCALE
        )
        return out[..., :512].reshape(-1, NUM_HEADS, 512)

    truth, _ = decode_oracle(
        q, cache, table, lens, starts, causal=False, softmax_scale=SOFTMAX_SCALE
    )
    calls = {
        "reference": reference,
        "value of 576": lambda: peer(576),
        "value of 512": lambda: peer(512),
    }
    took = time_in_turns(calls, repeats)
    best = min(("value of 576", "value of 512"), key=lambda name: median(took[name]))
    pairs = zip(took[best], took["reference"], strict=True)
    return {
        "query_len": query_len,
        "reference_ms": 1e3 * median(took["reference"]),
        "peer_ms": 1e3 * median(took[best]),
        "peer": best,
        "ratio": median([theirs / ours for theirs, ours in pairs]),
        "relative_error": float((reference().double() - truth).norm() / truth.norm()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def time_in_turns(
    calls: dict[str, Callable[[], torch.Tensor]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each call, all of them in turn, after a round that warms up."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:
                took[name].append(time.perf_counter() - begin)
    return took


def median(values: list[float]) -> float:
    """The middle value."""
    return statistics.median(values)


if __name__ == "__main__":
    main()
