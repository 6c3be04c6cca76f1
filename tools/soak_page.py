"""Write the measured part of docs/soak.md, and its plot, from benchmarks/figures.

Usage: ``soak_page.py``, from anywhere; the plot needs matplotlib. Reads
``benchmarks/figures/soak.json``: the log of benchmarks/soak.py, its samples of memory
turned into one list a column.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "soak.md"
PLOT = ROOT / "docs" / "figures" / "soak.svg"
FIGURES = ROOT / "benchmarks" / "figures"
PART = re.compile(r"(?s)(<!-- soak_page: log -->\n).*?(<!-- soak_page: end -->\n)")
KINDS = ("eager", "replay", "ubatches")
HEAD = (
    ("backend", "steps", *KINDS, "worst out", "worst LSE", "wrong rows"),
    ("---", "---:", "---:", "---:", "---:", "---:", "---:", "---:"),
)


def read() -> dict[str, Any]:
    """The log: settings, counts, worst errors, and bytes of memory at each check."""
    found: dict[str, Any] = json.loads(
        (FIGURES / "soak.json").read_text(encoding="utf-8")
    )
    return found


def facts(log: dict[str, Any]) -> str:
    """Where, when and how long, what was wrong, and what memory did."""
    about, grown = log["environment"], log["growth"]
    first = f"{about['gpu']}, {about['date']}, torch {about['torch']}"
    return (
        f"{first}, Python {about['python']}: {log['steps_done']:,} steps in "
        f"{log['seconds']:.0f} s, {log['checks']} checked, "
        f"{len(log['failures'])} wrong. After the first tenth of the steps, memory "
        f"passed its peak until then by {grown['allocated'] / 1e6:.1f} MB allocated and "
        f"{grown['reserved'] / 1e6:.1f} MB reserved."
    )


def rows(log: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row a backend: its steps by kind, and its largest errors."""
    found = []
    for backend, worst in sorted(log["worst"].items()):
        steps = [log["kinds"].get(f"{backend} {kind}", 0) for kind in KINDS]
        counts = (f"{number:,}" for number in (sum(steps), *steps))
        errors = (f"{worst[name]:.1e}" for name in ("out", "lse"))
        found.append((f"`{backend}`", *counts, *errors, f"{worst['rows']:.0f}"))
    return found


def page(text: str) -> str:
    """The page with its measured part written anew."""
    log = read()
    table = "\n".join(f"| {' | '.join(row)} |" for row in (*HEAD, *rows(log)))
    return PART.sub(
        lambda found: f"{found[1]}\n{facts(log)}\n\n{table}\n\n{found[2]}", text
    )


def draw() -> None:
    """Draw memory over the steps; the same log gives the same file."""
    matplotlib = import_module("matplotlib")
    log = read()
    memory, steps = log["memory"], log["settings"]["steps"]
    with matplotlib.rc_context({"svg.hashsalt": "mla-decode", "svg.fonttype": "none"}):
        make = import_module("matplotlib.figure").Figure
        figure = make(figsize=(7.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, colour in (("reserved", "0.55"), ("allocated", "tab:blue")):
            sizes = [size / 1e9 for size in memory[name]]
            axes.plot(memory["step"], sizes, color=colour, linewidth=1.2, label=name)
        axes.axvline(steps / 10, color="0.3", linestyle=":", linewidth=1)
        axes.annotate(
            "judged from here",
            (steps / 10, 0),
            textcoords="offset points",
            xytext=(4, 5),
            fontsize=9,
        )
        axes.set(xlabel="step", ylabel="GB", xlim=(0, steps), ylim=(0, None))
        axes.legend(frameon=False, loc="center right")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(PLOT, metadata={"Date": None, "Creator": None})


def main() -> int:
    """Write the page and its plot."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
