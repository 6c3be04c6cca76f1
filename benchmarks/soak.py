"""Decode tens of thousands of random steps, and watch values and memory.

    python benchmarks/soak.py --json soak.json            # 30,000 steps on this GPU
    python benchmarks/soak.py --json soak.json --resume   # where it was interrupted
    python benchmarks/soak.py --backend reference --device cpu --steps 200

Each step is one of a random layer group: a ragged batch over a cache of which every row
that is nobody's key holds NaN, decoded eagerly in two layers, as two micro-batches on two
streams, or by replaying a graph. Every `--check-every` steps its values are compared with
float64; so is the first of each kind of each layer group. Memory is sampled then too: in
a run of 5,000 steps or more it must not grow after the first tenth.

Steps are drawn from the seed and their number alone, so a run resumes where it ended, and
`--first-step N --steps 1` repeats the one that failed.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from soak_lanes import LANES, Lane, LaneShape, Size

from mla_decode import BackendRefused, DeviceInfo, detect_device

GPU_SIZE = Size(requests=32, seq_len=8192)
CPU_SIZE = Size(requests=4, seq_len=96)
MAX_FAILURES = 10
"""After so many wrong steps the soak ends."""
JUDGED_STEPS = 5_000
"""In a shorter run graphs are still being captured when a tenth is over."""
GROWTH_BYTES = 8 << 20
"""By which memory may pass its peak of the first tenth: the allocator's grain."""


@dataclass(slots=True, kw_only=True)
class Log:
    """What a soak found; this is the JSON."""

    settings: dict[str, Any]
    """What a resumed run must have in common with the one that it continues."""
    environment: dict[str, Any]
    steps_done: int = 0
    """Steps from the first on."""
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    """Steps by backend and kind."""
    refused: dict[str, str] = field(default_factory=dict)
    """Layer groups that a backend does not serve here, and why."""
    checks: int = 0
    worst: dict[str, dict[str, float]] = field(default_factory=dict)
    """Largest errors by backend."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)
    """Bytes at each check: ``allocated`` and ``reserved`` on a GPU, peak ``resident``
    on a CPU."""
    finished: bool = False

    def growth(self) -> dict[str, int]:
        """Bytes by which memory passed its peak of the first tenth of the steps."""
        limit = self.settings["first_step"] + self.settings["steps"] // 10
        early = [m for m in self.memory if m["step"] <= limit]
        late = [m for m in self.memory if m["step"] > limit]
        if not early or not late:
            return {}
        return {
            name: max(m[name] for m in late) - max(m[name] for m in early)
            for name in early[0]
            if name != "step"
        }

    def is_flat(self) -> bool:
        """Whether no kind of memory grew; a CPU's peak is reported and not judged."""
        grown = self.growth() if self.settings["steps"] >= JUDGED_STEPS else {}
        return all(
            grown[name] <= GROWTH_BYTES
            for name in ("allocated", "reserved")
            if name in grown
        )

    def write(self, path: Path | None) -> None:
        """Write the JSON in one go, so that an interrupted run leaves a whole file."""
        if path is None:
            return
        found = {**asdict(self), "growth": self.growth(), "flat": self.is_flat()}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def read_log(path: Path, settings: dict[str, Any]) -> Log:
    """Read the log of the run that is to be continued.

    Raises:
        typer.BadParameter: It is of another run.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        del found["growth"], found["flat"]
        log = Log(**found)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise typer.BadParameter(f"{path} is no log of a soak: {error}") from error
    if log.settings != settings:
        raise typer.BadParameter(
            f"{path} is the log of {log.settings}; this run is {settings}"
        )
    return log


def describe(device: DeviceInfo) -> dict[str, Any]:
    """Where and when a run begins."""
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "device": device.as_dict(),
        "gpu": torch.cuda.get_device_name() if device.vendor != "cpu" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def make_lanes(
    backends: list[str], device: DeviceInfo, size: Size, log: Log
) -> list[Lane]:
    """Every layer group that a backend serves here."""
    wanted = ((backend, shape) for backend in backends for shape in LANES[backend])
    lanes = (_lane(*which, device, size, log) for which in wanted)
    return [lane for lane in lanes if lane is not None]


def _lane(
    backend: str, shape: LaneShape, device: DeviceInfo, size: Size, log: Log
) -> Lane | None:
    try:
        return Lane(backend, shape, device, size)
    except BackendRefused as refused:
        log.refused[f"{backend} {shape}"] = str(refused)
        return None


def sample_memory(device: DeviceInfo, step: int) -> dict[str, int]:
    """Bytes held now, or on a CPU at the peak so far."""
    if device.vendor == "cpu":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return {"step": step, "resident": resident}
    return {
        "step": step,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


class Soak:
    """A run: its layer groups, its log."""

    def __init__(
        self, lanes: list[Lane], device: DeviceInfo, log: Log, *, check_every: int
    ) -> None:
        self.lanes, self.device, self.log = lanes, device, log
        self.check_every = check_every
        self.seen: set[tuple[int, str]] = set()

    def take(self, number: int) -> None:
        """Take one step, and check it where it is due."""
        generator = torch.Generator().manual_seed(
            (self.log.settings["seed"] << 32) + number
        )
        which = int(torch.randint(len(self.lanes), (), generator=generator))
        lane = self.lanes[which]
        kind = lane.kinds[int(torch.randint(len(lane.kinds), (), generator=generator))]
        step = lane.draw(generator, kind)
        out, lse = lane.run(step, kind)
        name = f"{lane.backend} {kind}"
        self.log.kinds[name] = self.log.kinds.get(name, 0) + 1
        is_new = (which, kind) not in self.seen
        self.seen.add((which, kind))
        if is_new or (number + 1) % self.check_every == 0:
            errors = lane.errors(step, out, lse, generator)
            self._note(number, lane, kind, errors)
        self.log.steps_done = number + 1 - self.log.settings["first_step"]

    def _note(
        self, number: int, lane: Lane, kind: str, errors: dict[str, float]
    ) -> None:
        log = self.log
        log.checks += 1
        worst = log.worst.setdefault(lane.backend, dict.fromkeys(errors, 0.0))
        for name, value in errors.items():
            worst[name] = max(worst[name], value)
        if not lane.accepts(errors):
            shape = asdict(lane.shape)
            failure = {"step": number, "backend": lane.backend, "kind": kind}
            log.failures.append({**failure, "shape": shape, **errors})
        log.memory.append(sample_memory(self.device, number))


def run(soak: Soak, json_file: Path | None) -> None:
    """Take the steps that are left, with a bar; the log is written at each check."""
    log = soak.log
    total, first = log.settings["steps"], log.settings["first_step"]
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with (
        torch.inference_mode(),
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("", total=total, completed=log.steps_done)
        began, before = time.perf_counter(), log.seconds
        while log.steps_done < total and len(log.failures) < MAX_FAILURES:
            checks = log.checks
            soak.take(first + log.steps_done)
            progress.update(bar, completed=log.steps_done)
            if log.checks > checks:
                log.seconds = before + time.perf_counter() - began
                progress.update(bar, description=f"{len(log.failures)} wrong")
                log.write(json_file)
        log.seconds = before + time.perf_counter() - began
    log.finished = log.steps_done == total
    log.write(json_file)


def main(
    backend: Annotated[
        list[str], typer.Option(help=f"Repeatable: {', '.join(LANES)}.")
    ] = ["triton_mla", "cuda_flashmla"],  # noqa: B006 - typer copies a default
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu.")] = "cuda",
    steps: Annotated[int, typer.Option(min=1)] = 30_000,
    first_step: Annotated[int, typer.Option(min=0)] = 0,
    check_every: Annotated[int, typer.Option(min=1)] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    resume: Annotated[bool, typer.Option("--resume")] = False,
) -> None:
    """Soak backends in random decode steps on one device."""
    unknown = sorted(set(backend) - set(LANES))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: not of {', '.join(LANES)}")
    if device != "cpu" and not torch.cuda.is_available():
        typer.echo("torch sees no GPU; a dry run: --backend reference --device cpu")
        raise typer.Exit(2)
    found = detect_device(device)
    settings = {
        "backends": sorted(backend),
        "arch": found.arch,
        "steps": steps,
        "first_step": first_step,
        "check_every": check_every,
        "seed": seed,
    }
    if resume:
        if json_file is None:
            raise typer.BadParameter("--resume needs the --json of the run")
        log = read_log(json_file, settings)
    else:
        log = Log(settings=settings, environment=describe(found))
    torch.manual_seed(seed)
    size = CPU_SIZE if found.vendor == "cpu" else GPU_SIZE
    lanes = make_lanes(sorted(backend), found, size, log)
    if not lanes:
        typer.echo("\n".join(["no backend serves a layer group:", *log.refused]))
        raise typer.Exit(2)
    run(Soak(lanes, found, log, check_every=check_every), json_file)
    typer.echo(
        f"{log.steps_done} steps in {log.seconds:.0f} s, {log.checks} checked, "
        f"{len(log.failures)} wrong; worst {log.worst}; memory grew by {log.growth()}"
    )
    if log.failures or not log.is_flat() or not log.finished:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
