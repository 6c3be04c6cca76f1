"""Hold triton_mla's kernels under compute-sanitizer's memcheck and racecheck.

    python benchmarks/triton_mla_sanitize.py [--sanitizer PATH]

First without a tool, so that all kernels are compiled; then under each, which prints a
line. Exit codes: 0 both found nothing, 1 one found something or did not run to its end,
4 there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from mla_decode import CommonAttentionMetadata, DecodeProblem, Mask, detect_device
from mla_decode_triton import chosen_backend

backend = chosen_backend("portable")
BOTH = (Mask.CAUSAL, Mask.NON_CAUSAL)
LENGTHS = (32, 200, 64, 321, 0)
"""Of the requests: tiles cut short, whole ones, and a pad. The cache holds not a page
more than these need, and with PYTORCH_NO_CUDA_MEMORY_CACHING not a byte."""
SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}
LIMIT_S = 300
DONE = "all cases done"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem; each mask is decoded with the keys split, and whole."""

    heads: int
    query_len: int
    page_size: int
    kv_dtype: str
    masks: tuple[Mask, ...] = (Mask.NON_CAUSAL,)
    extra_stride: int = 0
    """Elements between pages; an odd number of fp8 cannot be read in pairs."""

    def __str__(self) -> str:
        return (
            f"H{self.heads} Q{self.query_len} page {self.page_size} {self.kv_dtype} "
            f"{'+'.join(mask.value for mask in self.masks)} stride +{self.extra_stride}"
        )


CASES = (
    # 16-row tiles: pages shorter than a tile, and not; fp8 is read in pairs.
    Case(heads=5, query_len=3, page_size=1, kv_dtype="bf16", masks=BOTH),
    Case(heads=16, query_len=1, page_size=64, kv_dtype="bf16"),
    Case(heads=16, query_len=1, page_size=16, kv_dtype="fp8"),
    Case(heads=5, query_len=3, page_size=64, kv_dtype="fp8", masks=BOTH),
    # 64-row tiles: two of them, and one with most of its rows outside.
    Case(heads=16, query_len=8, page_size=16, kv_dtype="bf16", masks=BOTH),
    Case(heads=128, query_len=1, page_size=64, kv_dtype="bf16"),
    Case(heads=20, query_len=4, page_size=128, kv_dtype="fp8", masks=BOTH),
    Case(heads=17, query_len=1, page_size=16, kv_dtype="fp8"),
    # Triton's own way of launching, and bytes one by one.
    Case(heads=16, query_len=1, page_size=64, kv_dtype="fp8", extra_stride=1),
)


def run_case(case: Case) -> None:
    """Decode under the case's masks, split and whole.

    Raises:
        RuntimeError: Keys were not split, or split, where they should not have been;
            or an output is not finite.
    """
    page = case.page_size
    used = [-(-n // page) for n in LENGTHS]
    table = torch.full((len(LENGTHS), max(used)), -1, dtype=torch.int32)
    for request, mine in enumerate(torch.randperm(sum(used)).int().split(used)):
        table[request, : len(mine)] = mine
    stride = page * 576 + case.extra_stride
    dtype = torch.float8_e4m3fn if case.kv_dtype == "fp8" else torch.bfloat16
    rows = torch.randn(sum(used), stride).to(dtype)
    cache = torch.empty((sum(used) - 1) * stride + page * 576, dtype=dtype).cuda()
    cache.copy_(rows.view(-1)[: cache.numel()])
    cache = cache.as_strided((sum(used), page, 576), (stride, 576, 1))
    starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32) * case.query_len
    starts[-1] = starts[-2]
    q = torch.randn(len(LENGTHS) * case.query_len, case.heads, 576).bfloat16().cuda()
    scale = torch.ones(1, device="cuda") if case.kv_dtype == "fp8" else None
    for max_splits in (None, 1):
        problem = DecodeProblem(
            num_q_heads=case.heads,
            kv_dtype=case.kv_dtype,
            page_size=page,
            kv_page_stride=stride if case.extra_stride else None,
            query_lens=frozenset({case.query_len}),
            masks=frozenset(case.masks),
            needs_lse=True,
            max_splits=max_splits,
            max_num_reqs=len(LENGTHS),
            max_model_len=max(LENGTHS),
        )
        builder = backend.builder_cls(problem, detect_device())
        for mask in case.masks:
            common = CommonAttentionMetadata(
                query_start_loc=starts.cuda(),
                query_start_loc_cpu=starts,
                seq_lens=torch.tensor(LENGTHS, dtype=torch.int32, device="cuda"),
                num_reqs=len(LENGTHS),
                num_actual_tokens=int(starts[-1]),
                max_query_len=case.query_len,
                max_seq_len=max(LENGTHS),
                block_table_tensor=table.cuda(),
                causal=mask is Mask.CAUSAL,
            )
            metadata = builder.build(common)
            is_split = metadata.step.num_splits > 1
            out = backend.forward(
                q, cache, metadata, softmax_scale=192**-0.5, kv_scale=scale
            ).out
            if is_split != (max_splits is None) or not out.isfinite().all():
                raise RuntimeError(f"{case}: splits {metadata.step.num_splits}, {out}")


def run_cases() -> None:
    """All of them, in this process."""
    torch.manual_seed(0)
    for case in CASES:
        run_case(case)
        print(case, flush=True)
    print(DONE, flush=True)


def verdict(words: list[str], summary: re.Pattern[str] | None) -> tuple[bool, str]:
    """Run the cases behind these words; whether nothing is wrong, in a line."""
    command = [*words, sys.executable, __file__, "--cases"]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(  # noqa: S603 - the tool that the caller named, and us
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return False, f"not done within {LIMIT_S} s"
    found = None if summary is None else summary.search(done.stdout)
    is_clean = done.returncode == 0 and DONE in done.stdout
    is_clean = is_clean and (summary is None or (found is not None and found[1] == "0"))
    if not is_clean:
        sys.stderr.write(done.stdout[-6000:])
    said = "no summary" if found is None else found[0]
    return is_clean, f"{said}, exit {done.returncode}, {time.monotonic() - began:.0f} s"


def main() -> int:
    """Compile, check twice, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="its path")
    parser.add_argument("--cases", action="store_true", help="run them and no tool")
    options = parser.parse_args()
    if options.cases:
        run_cases()
        return 0
    tool = shutil.which(options.sanitizer)
    if tool is None:
        sys.stderr.write(f"no {options.sanitizer} here: name it by --sanitizer\n")
        return 4
    is_clean, line = verdict([], None)
    print(f"without a tool: {'ran' if is_clean else 'FAILED'} ({line})", flush=True)
    for name, summary in SUMMARIES.items() if is_clean else ():
        words = [tool, "--tool", name, "--error-exitcode", "9"]
        clean_here, line = verdict(words, summary)
        print(f"{name}: {'clean' if clean_here else 'FAILED'} ({line})", flush=True)
        is_clean = is_clean and clean_here
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
