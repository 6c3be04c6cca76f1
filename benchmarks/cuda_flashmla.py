"""The FlashMLA adapter on a Hopper GPU: values, graphs, simulator, overhead.

    python benchmarks/cuda_flashmla.py --out DIR [--budget 240]
    python benchmarks/cuda_flashmla.py --out DIR --sections host   (host time alone)
    python benchmarks/cuda_flashmla.py --out DIR --assume      (a dry run on a CPU)

Writes DIR/cuda_flashmla.json, and prints the tables of docs/flashmla.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from cuda_flashmla_differential import run_differential, run_rejections
from cuda_flashmla_overhead import kernel_names, run_host, run_overhead
from cuda_flashmla_values import run_graphs, run_values

from mla_decode import DeviceInfo, detect_device
from mla_decode_cuda_flashmla.library import library_for

if TYPE_CHECKING:
    from collections.abc import Callable

SECTIONS = ("values", "graphs", "overhead", "kernels", "rejections", "differential")


def main() -> None:
    """Run the chosen sections within the budget and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    parser.add_argument("--assume", action="store_true", help="simulate on the CPU")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=20261129)
    options = parser.parse_args()
    device = DeviceInfo.assume("sm_90") if options.assume else detect_device()
    torch.manual_seed(options.seed)
    report: dict[str, Any] = {"about": describe(device)}
    print(json.dumps(report["about"]))
    jobs = make_jobs(device, options)
    began = time.monotonic()
    for name in options.sections.split(","):
        spent = time.monotonic() - began
        if spent > options.budget:
            report[name] = "not run: the budget was spent"
            continue
        start = time.monotonic()
        try:
            report[name] = jobs[name]()
        except Exception:  # noqa: BLE001 - one section's failure must not lose the others
            report[name] = {"error": traceback.format_exc(limit=6)}
        report.setdefault("seconds", {})[name] = round(time.monotonic() - start, 1)
        show(name, report[name])
        options.out.mkdir(parents=True, exist_ok=True)
        target = options.out / f"cuda_flashmla_{report['about']['form']}.json"
        target.write_text(json.dumps(report, indent=1, default=str))
    print("seconds", report["seconds"])


def make_jobs(
    device: DeviceInfo, options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """The sections as calls."""
    small = device.assumed
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    if library_for(device).fp8 is not None:
        dtypes += ("fp8",)
    rounds = 4 if small else 60
    return {
        "values": lambda: run_values(device, dtypes, small=small),
        "graphs": lambda: {
            dtype: run_graphs(device, dtype, replays=6 if small else 60)
            for dtype in dtypes
            if dtype != "fp16"
        },
        "overhead": lambda: run_overhead(
            device, bursts=rounds, rounds=rounds, small=small
        ),
        "host": lambda: run_host(device, bursts=2 * rounds, small=small),
        "kernels": lambda: kernel_names(device),
        "rejections": lambda: run_rejections(on_card=not device.assumed),
        "differential": lambda: run_differential(
            device, options.problems, small=small, seed=options.seed
        ),
    }


def describe(device: DeviceInfo) -> dict[str, str]:
    """What ran, where and when."""
    library = library_for(device)
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": device.name or f"assumed {device.arch}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "library": f"{library.distribution} {library.version}",
        "form": library.dense.form + ("_fp8" if library.fp8 is not None else ""),
    }


def show(name: str, result: Any) -> None:
    """Print a section: lists of rows as tables."""
    print(f"## {name}")
    if isinstance(result, list) and result and isinstance(result[0], dict):
        head = list(dict.fromkeys(key for row in result for key in row))
        print("| " + " | ".join(head) + " |")
        print("|" + " --- |" * len(head))
        for row in result:
            print("| " + " | ".join(_cell(row.get(key, "")) for key in head) + " |")
    else:
        print(json.dumps(result, indent=1, default=str))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
