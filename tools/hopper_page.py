"""Write the measured part of docs/hopper.md, and its plot, from benchmarks/figures.

Usage: ``hopper_page.py``, from anywhere; the plot needs matplotlib. Reads
``benchmarks/figures/hopper_points.jsonl``, the results of ``hopper_mla.py points``.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "hopper.md"
PLOT = ROOT / "docs" / "figures" / "hopper.svg"
FIGURES = ROOT / "benchmarks" / "figures"
PART = re.compile(
    r"(?s)(<!-- hopper_page: points -->\n).*?(<!-- hopper_page: end -->\n)"
)
BATCHES = tuple(product((1, 16, 64, 128), ("1k", "4k", "16k")))
LENGTHS = {"1k": 1024, "4k": 4096, "16k": 16384}


class Measured(NamedTuple):
    """One point: its shape, our time and the best peer's."""

    rows: int
    heads: int
    query_len: int
    requests: int
    mean: int
    ragged: bool
    ours_us: float
    best_us: float
    best: str

    @property
    def ratio(self) -> float:
        """How many times the best peer's time is ours."""
        return self.best_us / self.ours_us


def read() -> list[Measured]:
    """All points of the figures."""
    found = []
    for line in (FIGURES / "hopper_points.jsonl").read_text().splitlines():
        row = json.loads(line)
        point, times = row["point"], dict(row["us"])
        ours = times.pop("ours")
        best = min(times, key=lambda name: float(times[name]))
        found.append(
            Measured(
                rows=point["heads"] * point["query_len"],
                heads=point["heads"],
                query_len=point["query_len"],
                requests=point["requests"],
                mean=point["mean"],
                ragged=point["ragged"],
                ours_us=ours,
                best_us=times[best],
                best=best,
            )
        )
    return found


def summary(name: str, points: list[Measured]) -> tuple[str, ...]:
    """One row: how many points, their geometric mean, the share won, the worst."""
    ratios = [point.ratio for point in points]
    won = sum(ratio >= 1 for ratio in ratios) / len(ratios)
    behind = sum(ratio < 0.95 for ratio in ratios)
    mean = statistics.geometric_mean(ratios)
    texts = (f"{mean:.3f}", f"{won:.0%}", str(behind), f"{min(ratios):.3f}")
    return (name, str(len(ratios)), *texts)


def table(*rows: tuple[str, ...]) -> str:
    """A table whose first row is the head."""
    head, *body = rows
    rule = ("---", *("---:" for _ in head[1:]))
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def parts(points: list[Measured]) -> str:
    """The summary, then the ratio of every uniform shape and of every ragged one."""
    uniform = [point for point in points if not point.ragged]
    ragged = [point for point in points if point.ragged]
    few = [point for point in uniform if point.rows <= 32]
    one = [point for point in uniform if point.requests == 1]
    head = ("points", "number", "geomean", "won", "below 0.95", "worst")
    first = table(
        head,
        summary("uniform, all", uniform),
        summary("uniform, Q * H <= 32", few),
        summary("uniform, one request", one),
        summary(
            "uniform, 16 requests and more, Q * H > 32",
            [p for p in uniform if p not in few and p not in one],
        ),
        summary("ragged", ragged),
    )
    rows = [("Q * H", *(f"{batch} x {length}" for batch, length in BATCHES))]
    for height in sorted({point.rows for point in uniform}):
        cells = []
        for batch, length in BATCHES:
            ratios = [
                point.ratio
                for point in uniform
                if (point.rows, point.requests, point.mean)
                == (height, batch, LENGTHS[length])
            ]
            mean = statistics.geometric_mean(ratios) if ratios else None
            cells.append("" if mean is None else f"{mean:.2f}")
        rows.append((str(height), *cells))
    shapes = sorted({(p.heads, p.query_len, p.requests, p.mean) for p in ragged})
    last = [("ragged", "ours, us", "best peer, us", "ratio")]
    for shape in shapes:
        mine = [
            p for p in ragged if (p.heads, p.query_len, p.requests, p.mean) == shape
        ]
        heads, query_len, requests, mean = shape
        last.append(
            (
                f"H {heads}, Q {query_len}, B {requests}, mean {mean}",
                " ".join(f"{p.ours_us:.0f}" for p in mine),
                " ".join(f"{p.best_us:.0f}" for p in mine),
                f"{statistics.geometric_mean([p.ratio for p in mine]):.2f}",
            )
        )
    return "\n\n".join((first, table(*rows), table(*last)))


def page(text: str) -> str:
    """The page with its measured part written anew."""
    written = parts(read())
    return PART.sub(lambda found: f"{found[1]}\n{written}\n\n{found[2]}", text)


def draw() -> None:
    """Draw the ratio over the time of each point; the same figures give the same file."""
    matplotlib = import_module("matplotlib")
    points = read()
    kinds = (
        ("ragged", "tab:green", [p for p in points if p.ragged]),
        ("uniform, one request", "tab:blue", [p for p in points if p.requests == 1]),
        (
            "uniform, more",
            "0.45",
            [p for p in points if not p.ragged and p.requests > 1],
        ),
    )
    with matplotlib.rc_context({"svg.hashsalt": "mla-decode", "svg.fonttype": "none"}):
        make = import_module("matplotlib.figure").Figure
        figure = make(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.subplots()
        for name, colour, mine in kinds:
            times, ratios = [p.ours_us for p in mine], [p.ratio for p in mine]
            axes.scatter(times, ratios, s=14, color=colour, linewidth=0, label=name)
        axes.axhline(1, color="0.3", linewidth=1)
        axes.set_xscale("log")
        axes.set(xlabel="this kernel, us", ylabel="best peer's time / ours")
        axes.legend(frameon=False, loc="upper right")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(PLOT, metadata={"Date": None, "Creator": None})


def main() -> int:
    """Write the page and its plot."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
