"""What planning costs the host: a new problem, the same one again, and a selection.

Every cell of the coverage grid (blocks of 2 to 16 tokens, 8 to 128 heads) is planned as
a non-causal block. A cell's figure is the median of its rounds, each with a problem that
nobody asked about before; the table gives the median and the 90th percentile of cells,
in CPU time of the process, of the pass with the lowest median: what others do on the
machine adds to a pass and takes nothing from it.

    python benchmarks/planning.py [--rounds 7] [--passes 3] [--backend rocm_aiter]
        [--cold] [--json]

Pin it to one core (`taskset -c 1`) and read the load beside the figures.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mla_decode import DecodeProblem, DeviceInfo, Mask, discover, survey
from mla_decode.cli.coverage import HEADS, QUERY_LENS
from mla_decode.lowering import plan_exact

if TYPE_CHECKING:
    from collections.abc import Callable


COLUMNS = ("plan", "cached", "exact", "refuse")


class Class(NamedTuple):
    """A backend on a device with a pair of dtypes."""

    backend: str
    arch: str
    libraries: tuple[tuple[str, str], ...]
    q_dtype: str
    kv_dtype: str

    @property
    def label(self) -> str:
        """One line's beginning."""
        release = " ".join(version for _, version in self.libraries)
        dtypes = f"{self.q_dtype}/{self.kv_dtype}"
        return f"{self.backend:13} {self.arch:6} {release:12} {dtypes}"


_PAIRS = (("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"))
CLASSES = (
    *(
        Class("rocm_aiter", arch, (("amd-aiter", release),), *pair)
        for arch, release, pair in itertools.product(
            ("gfx942", "gfx950"), ("0.1.20.post1", "0.1.16.post6"), _PAIRS
        )
    ),
    Class("cuda_flashmla", "sm_90", (), "bf16", "bf16"),
    Class("triton_mla", "sm_90", (), "bf16", "bf16"),
    Class("triton_mla", "gfx942", (), "bf16", "fp8"),
    Class("reference", "cpu", (), "bf16", "bf16"),
)


def main(
    *,
    rounds: Annotated[int, typer.Option(help="Problems a cell.")] = 7,
    passes: Annotated[int, typer.Option(help="Times over all; the best counts.")] = 3,
    backend: Annotated[str, typer.Option(help="This backend alone.")] = "",
    cold: Annotated[
        bool, typer.Option(help="Forget AITER's resolved kernels between rounds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object.")] = False,
) -> None:
    """Print microseconds by backend and class of problem."""
    logging.disable(logging.INFO)
    asked = [item for item in CLASSES if not backend or item.backend == backend]
    runs = [
        [measure(item, rounds, cold=cold, done=done) for item in asked]
        for done in range(passes)
    ]
    found = [
        {"class": item._asdict(), **{name: _best(name, seen) for name in COLUMNS}}
        for item, seen in zip(asked, zip(*runs, strict=True), strict=True)
    ]
    machine = {
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "cores": len(os.sched_getaffinity(0)),
    }
    if as_json:
        print(json.dumps({"machine": machine, "classes": found}))
        return
    print(" ".join(f"{key} {value}" for key, value in machine.items()))
    for item in found:
        columns = (
            f"{name} {item[name]['median']:5.0f} ({item[name]['p90']:5.0f})"
            for name in COLUMNS
        )
        print(f"{Class(**item['class']).label:46}", "  ".join(columns))


def measure(
    item: Class, rounds: int, *, cold: bool, done: int
) -> dict[str, dict[str, float]]:
    """Median and 90th percentile over cells, in microseconds.

    Args:
        item: What is asked.
        rounds: Problems a cell.
        cold: Whether each of them meets an adapter that remembers nothing.
        done: Passes before this one, whose problems are not asked about again.

    Returns:
        ``plan``: an exact plan of a new problem; ``cached``: of the same one again;
        ``exact`` and ``refuse``: a whole survey of that backend, new problem.
    """
    candidates = discover()
    asked = candidates[item.backend].backend
    if asked is None:
        raise typer.BadParameter(f"{item.backend} is not installed")
    device = DeviceInfo.assume(item.arch, libraries=dict(item.libraries))
    took: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for heads, query_len in itertools.product(HEADS, QUERY_LENS):
        spent: dict[str, list[float]] = {name: [] for name in COLUMNS}
        first = done * (rounds + 1)
        for number in range(first, first + rounds + 1):  # the first warms up
            if cold:
                forget(item)
            problems = (
                DecodeProblem(
                    num_q_heads=heads,
                    q_dtype=item.q_dtype,
                    kv_dtype=item.kv_dtype,
                    query_lens=frozenset((query_len,)),
                    masks=frozenset((Mask.NON_CAUSAL,)),
                    max_num_reqs=20 + 3 * number + i,
                )
                for i in range(3)
            )
            plan = partial(plan_exact, next(problems), asked, device)
            ask = partial(survey, device=device, backend=item.backend)
            calls: tuple[Callable[[], object], ...] = (
                plan,
                plan,
                partial(ask, next(problems), lowering="exact", candidates=candidates),
                partial(ask, next(problems), lowering="refuse", candidates=candidates),
            )
            for name, call in zip(COLUMNS, calls, strict=True):
                begin = time.process_time_ns()
                call()
                if number > first:
                    spent[name].append(1e-3 * (time.process_time_ns() - begin))
        for name, values in spent.items():
            took[name].append(statistics.median(values))
    return {name: _summary(values) for name, values in took.items()}


def _best(
    name: str, passes: tuple[dict[str, dict[str, float]], ...]
) -> dict[str, float]:
    """A column's figures in the pass that has the lowest median."""
    return min((found[name] for found in passes), key=lambda found: found["median"])


def _summary(values: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p90": deciles[-1]}


def forget(item: Class) -> None:
    """Drop what AITER's adapter remembers of kernels; a plan's cache is by problem."""
    if item.backend == "rocm_aiter":
        from mla_decode_rocm_aiter.facts import packaged_facts  # noqa: PLC0415 - only asked of this backend

        packaged_facts.cache_clear()


def cpu_model() -> str:
    """The model as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    typer.run(main)
