"""Accuracy and speed of AITER against Triton on an AMD GPU, native and lowered.

    python benchmarks/rocm_accuracy_speed.py --out DIR
    python benchmarks/rocm_accuracy_speed.py --out DIR --assume gfx950   (dry, on a CPU)

One command, one report: DIR/rocm_accuracy_speed.json and .md. Accuracy is against the
float64 oracle; speed is the median of device-side times of one layer's forward, and of
one build. It has never been run on an AMD GPU: the first owner of an MI300X or MI355X
who runs it writes the first line of that history. A dry run checks values on the
simulator and reports no speed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mla_decode import (
    BackendRefused,
    CommonAttentionMetadata,
    DecodeProblem,
    DeviceInfo,
    Mask,
    MLADecoder,
    OutdatedLibraryError,
    detect_device,
)
from mla_decode.dtypes import torch_dtype
from mla_decode.reference.oracle import decode_oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCALE = 192**-0.5
CONTENDERS = (
    ("rocm_aiter", "refuse"),
    ("rocm_aiter", "exact"),
    ("triton_mla", "refuse"),
    ("triton_mla", "exact"),
)
EXIT_NO_GPU = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape of serving."""

    heads: int
    query_len: int
    mask: str
    dtypes: str
    requests: int
    seq_len: int
    page_size: int = 64


def accuracy_cases() -> Iterator[Case]:
    """Few keys, where a wrong mask or a lost key cannot hide."""
    for dtypes in ("bf16 bf16", "fp8 fp8", "bf16 fp8"):
        for heads in (8, 12, 16, 32, 48, 64, 96, 128):
            for query_len in (1, 2, 3, 4, 6, 8):
                for mask in ("causal", "non_causal") if query_len > 1 else ("causal",):
                    yield Case(
                        heads=heads,
                        query_len=query_len,
                        mask=mask,
                        dtypes=dtypes,
                        requests=3,
                        seq_len=300,
                    )


def speed_cases() -> Iterator[Case]:
    """Draft blocks and verifies as engines serve them."""
    for dtypes in ("bf16 bf16", "fp8 fp8"):
        for heads in (12, 16, 32, 64, 128):
            for query_len, mask in ((1, "causal"), (4, "causal"), (7, "non_causal")):
                for requests, seq_len in ((1, 32768), (16, 8192), (64, 16384)):
                    yield Case(
                        heads=heads,
                        query_len=query_len,
                        mask=mask,
                        dtypes=dtypes,
                        requests=requests,
                        seq_len=seq_len,
                    )


class Inputs:
    """Tensors of a case, drawn once and shared by all contenders."""

    def __init__(self, case: Case, device: DeviceInfo) -> None:
        q_dtype, kv_dtype = case.dtypes.split()
        self.problem = DecodeProblem(
            num_q_heads=case.heads,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            page_size=case.page_size,
            query_lens=frozenset({case.query_len}),
            masks=frozenset({Mask(case.mask)}),
            max_num_reqs=case.requests,
            max_model_len=case.seq_len,
        )
        where = torch.device(device.torch_device)
        generator = torch.Generator(device=where).manual_seed(17)
        lens = [
            max(case.query_len, case.seq_len - 37 * at) for at in range(case.requests)
        ]
        width = self.problem.table_width
        pages = case.requests * width
        shape = (pages, case.page_size, 576)
        cache = torch.randn(shape, generator=generator, device=where)
        self.cache = cache.to(torch_dtype(kv_dtype, device))
        rows = case.requests * case.query_len
        q = torch.randn(rows, case.heads, 576, generator=generator, device=where)
        self.q = q.to(torch_dtype(q_dtype, device))
        order = torch.randperm(pages, generator=generator, device=where).int()
        starts = torch.arange(0, rows + 1, case.query_len, dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts.to(where),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=where),
            num_reqs=case.requests,
            num_actual_tokens=rows,
            max_query_len=case.query_len,
            max_seq_len=max(lens),
            block_table_tensor=order.view(case.requests, width),
            causal=case.mask == "causal",
        )
        one = torch.ones(1, device=where)
        self.scales = {
            name: one
            for name, dtype in (("q_scale", q_dtype), ("kv_scale", kv_dtype))
            if dtype == "fp8"
        }

    def truth(self) -> torch.Tensor:
        """The float64 oracle's output."""
        out, _ = decode_oracle(
            self.q.cpu().float(),
            self.cache.cpu().float(),
            self.common.block_table_tensor.cpu(),
            self.common.seq_lens.cpu(),
            self.common.query_start_loc_cpu,
            causal=bool(self.common.causal),
            softmax_scale=SCALE,
        )
        return out


def serve(
    inputs: Inputs, device: DeviceInfo, backend: str, lowering: str
) -> tuple[MLADecoder, Callable[[], torch.Tensor]] | str:
    """A decoder and one forward of it, or the codes of its refusal."""
    try:
        decoder = MLADecoder(
            inputs.problem,
            backend,
            "exact" if lowering == "exact" else "refuse",
            device=device,
        )
    except BackendRefused as error:
        return ", ".join(sorted(set(error.codes)))
    except OutdatedLibraryError as error:
        return f"version: {error.installed}"
    plan = decoder.plan(inputs.common)

    def forward() -> torch.Tensor:
        output = decoder.run(
            inputs.q, inputs.cache, plan, softmax_scale=SCALE, **inputs.scales
        )
        return output.out

    return decoder, forward


def measure_accuracy(case: Case, device: DeviceInfo) -> dict[str, Any]:
    """Relative error of each contender, in the root mean square and at its worst."""
    inputs = Inputs(case, device)
    truth = inputs.truth()
    row: dict[str, Any] = asdict(case)
    for backend, lowering in CONTENDERS:
        served = serve(inputs, device, backend, lowering)
        name = f"{backend} {lowering}"
        if isinstance(served, str):
            row[name] = {"refused": served}
            continue
        decoder, forward = served
        error = forward().cpu().double() - truth
        row[name] = {
            "plan": decoder.selection.plan.kind,
            "rms": float(error.pow(2).mean().sqrt() / truth.pow(2).mean().sqrt()),
            "worst": float(error.abs().max() / truth.abs().max()),
        }
    return row


def measure_speed(case: Case, device: DeviceInfo, repeats: int) -> dict[str, Any]:
    """Median microseconds of a forward and of a build, per contender."""
    inputs = Inputs(case, device)
    row: dict[str, Any] = asdict(case)
    for backend, lowering in CONTENDERS:
        served = serve(inputs, device, backend, lowering)
        name = f"{backend} {lowering}"
        if isinstance(served, str):
            row[name] = {"refused": served}
            continue
        decoder, forward = served
        plan = decoder.selection.plan
        row[name] = {
            "plan": plan.kind,
            "kv_walks": plan.cost.kv_walks,
            "forward_us": median_us(forward, repeats),
            "build_us": median_us(lambda d=decoder: d.plan(inputs.common), repeats),
        }
    return row


def median_us(run: Callable[[], Any], repeats: int) -> float:
    """Median device time of a call after five that warm up."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def describe(device: DeviceInfo) -> dict[str, Any]:
    """What ran where."""
    from mla_decode_rocm_aiter import backend  # noqa: PLC0415 - the adapter under test

    return {
        "device": device.as_dict(),
        "evidence": "simulated" if device.assumed else "hardware",
        "libraries": dict(backend.library_versions(device)),
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def as_markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    about = report["about"]
    lines = [
        f"# AITER against Triton on {about['device']['arch']} ({about['evidence']})",
        "",
        f"{about['date']}, {about['libraries']}, torch {about['torch']}",
    ]
    names = [f"{backend} {lowering}" for backend, lowering in CONTENDERS]
    for section in ("accuracy", "speed"):
        rows = report[section]
        if not isinstance(rows, list):
            lines += ["", f"## {section}", "", str(rows)]
            continue
        lines += ["", f"## {section}", "", "| case | " + " | ".join(names) + " |"]
        lines.append("| --- " * (len(names) + 1) + "|")
        for row in rows:
            case = (
                f"{row['heads']}h Q{row['query_len']} {row['mask']} {row['dtypes']} "
                f"{row['requests']}x{row['seq_len']}"
            )
            cells = " | ".join(_cell(row[name]) for name in names)
            lines.append(f"| {case} | {cells} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"refused: {found['refused']}"
    if "rms" in found:
        return f"{found['plan']} {found['rms']:.1e} / {found['worst']:.1e}"
    return f"{found['plan']} {found['forward_us']:.1f} us, {found['kv_walks']} walks"


def main() -> int:
    """Run both sections and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--assume", metavar="ARCH", help="dry run on a CPU")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--limit", type=int, default=0, help="cases per section")
    options = parser.parse_args()
    device = DeviceInfo.assume(options.assume) if options.assume else detect_device()
    if not options.assume and device.vendor != "rocm":
        sys.stderr.write(
            f"this machine has {device.arch}, no AMD GPU: run it on a gfx942 or gfx950, "
            "or dry with --assume gfx950\n"
        )
        return EXIT_NO_GPU
    limit = options.limit or None
    report: dict[str, Any] = {"about": describe(device)}
    report["accuracy"] = [
        measure_accuracy(case, device) for case in list(accuracy_cases())[:limit]
    ]
    report["speed"] = "not measured: a simulation has no speed"
    if not device.assumed:
        report["speed"] = [
            measure_speed(case, device, options.repeats)
            for case in list(speed_cases())[:limit]
        ]
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    (options.out / "rocm_accuracy_speed.json").write_text(text, encoding="utf-8")
    markdown = as_markdown(report)
    (options.out / "rocm_accuracy_speed.md").write_text(markdown, encoding="utf-8")
    print(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
