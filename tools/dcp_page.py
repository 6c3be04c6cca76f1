"""Write the measured parts of docs/dcp.md from what benchmarks/dcp.py printed.

Usage: ``dcp_page.py``, from anywhere. Reads ``benchmarks/figures/dcp_time.json`` and
``dcp_check.json``: the JSON of the benchmark's two commands, kept as printed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

Row = tuple[str, ...]
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dcp.md"
FIGURES = ROOT / "benchmarks" / "figures"
PART = re.compile(r"(?s)(<!-- dcp_page: (\w+) -->\n).*?(<!-- dcp_page: end -->\n)")
METHODS = {
    "graph": "Replayed from a graph, the collective within it, as engines step",
    "eager": "Eager, launched anew each step",
}
TIME_HEAD = (
    ("backend", "S", "B", "Q", "step us", "of it merge", "one GPU us", "speedup"),
    ("---", "---:", "---:", "---:", "---:", "---:", "---:", "---:"),
)
CHECK_HEAD = (
    ("backend", "interleave", "Q", "mask", "error", "one GPU", "replay", "holds"),
    ("---", "---:", "---:", "---", "---:", "---:", "---", "---"),
)


def read(name: str) -> dict[str, Any]:
    """The figures of one command: the facts of its run, and its rows."""
    path = FIGURES / f"dcp_{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def facts(run: dict[str, Any]) -> str:
    """One sentence: where, when, with what."""
    said = [f"{run['ranks']} x {run['device']}", run["library"], run["date"]]
    said += [f"{name} {run[name]}" for name in ("torch", "triton") if name in run]
    said.append(f"H = {run['heads']}")
    said += [f"interleave {run['interleave']}"] if "interleave" in run else []
    return ", ".join(said) + "." + (f" {run['note']}" if "note" in run else "")


def table(head: tuple[Row, ...], rows: list[Row]) -> str:
    """Lines of a table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (*head, *rows)) + "\n"


def time_rows(run: dict[str, Any], method: str) -> list[Row]:
    """One row a point that was timed by this method."""
    return [
        (
            f"`{row['backend']}`",
            f"{row['S'] // 1024}k",
            str(row["B"]),
            str(row["Q"]),
            f"{row['step_us']:,.0f}",
            f"{max(0.0, row['merge_share']):.0%}",
            f"{row['one_rank_us']:,.0f}",
            f"{row['speedup']:.2f}x",
        )
        for row in run["rows"]
        if row["method"] == method
    ]


def times() -> str:
    """A table a method; a method that was not measured says so."""
    run = read("time")
    parts = [f"{facts(run)}\n"]
    for method, said in METHODS.items():
        rows = time_rows(run, method)
        told = table(TIME_HEAD, rows) if rows else "Not measured yet.\n"
        parts.append(f"**{said}**\n\n{told}")
    return "\n".join(parts)


def checks() -> str:
    """The table of values against the float64 oracle."""
    run = read("check")
    rows: list[Row] = [
        (
            f"`{row['backend']}`",
            str(row["interleave"]),
            str(row["Q"]),
            row["mask"].replace("_", "-"),
            row["rel_error"],
            row["one_rank"],
            "same bits" if row["graph_equal"] == "True" else row["graph_equal"],
            "yes" if row["ok"] else "**no**",
        )
        for row in run["rows"]
    ]
    return f"{facts(run)}\n\n{table(CHECK_HEAD, rows)}"


PARTS = {"times": times, "checks": checks}


def page(text: str) -> str:
    """The page with its measured parts written anew."""
    return PART.sub(
        lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}",
        text,
    )


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
