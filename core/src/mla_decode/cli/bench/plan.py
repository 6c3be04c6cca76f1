"""Which backends are timed, and at which points."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from mla_decode.cli.bench.points import Point
from mla_decode.errors import ArgumentError
from mla_decode.selection import AUTO_ORDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mla_decode.cli.bench.points import Layout
    from mla_decode.device import DeviceInfo
    from mla_decode.discovery import Candidate

_UNREAL = ("simulated", "interpreted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The axes of a run; their product is timed."""

    num_heads: tuple[int, ...]
    query_lens: tuple[int, ...]
    batches: tuple[int, ...]
    seq_lens: tuple[int, ...]


def default_grid(
    device: DeviceInfo,
    num_heads: list[int] | None,
    query_lens: list[int] | None,
    batches: list[int] | None,
    seq_lens: list[int] | None,
) -> Grid:
    """What was asked for, and for the rest a few points: seconds, on a CPU too."""
    is_cpu = device.torch_device == "cpu"
    return Grid(
        num_heads=tuple(num_heads or (16,)),
        query_lens=tuple(query_lens or (1, 4)),
        batches=tuple(batches or ((2,) if is_cpu else (1, 16, 64))),
        seq_lens=tuple(seq_lens or ((256, 1024) if is_cpu else (1024, 4096, 16384))),
    )


def grid_points(grid: Grid, layout: Layout, *, causal: bool) -> list[Point]:
    """Every point of the grid whose requests can hold their block.

    Raises:
        ArgumentError: None can.
    """
    axes = product(grid.num_heads, grid.query_lens, grid.batches, grid.seq_lens)
    points = [
        Point(
            num_heads=heads,
            query_len=block,
            seq_lens=(seq_len,) * batch,
            causal=causal,
            layout=layout,
        )
        for heads, block, batch, seq_len in axes
        if block <= seq_len
    ]
    if not points:
        raise ArgumentError(
            "No request of the grid can hold a block.",
            got=f"blocks {grid.query_lens}, requests of {grid.seq_lens}",
            allowed="a --seq-len of at least one --query-len",
            fix="make the requests longer",
        )
    return points


def trace_points(
    steps: Iterable[tuple[int, ...]],
    grid: Grid,
    layout: Layout,
    *,
    count: int,
    non_causal: bool,
) -> list[Point]:
    """Steps taken evenly from a replay: each verifies, and drafts where asked."""
    every = list(steps)
    chosen = [every[i * len(every) // count] for i in range(min(count, len(every)))]
    if len(every) < count:
        chosen = every
    origins = ("draft", "verify") if non_causal else ("verify",)
    return [
        Point(
            num_heads=heads,
            query_len=max(grid.query_lens),
            seq_lens=lens,
            causal=origin == "verify",
            layout=layout,
            origin=origin,
        )
        for heads in grid.num_heads
        for lens in chosen
        for origin in origins
    ]


def backends_of(
    device: DeviceInfo, candidates: Mapping[str, Candidate], named: list[str]
) -> list[str]:
    """The named backends, or all that auto may ask here and that really run.

    Raises:
        ArgumentError: A name is no backend's, or nothing that runs is installed.
    """
    unknown = sorted(set(named) - set(candidates))
    if unknown:
        raise ArgumentError(
            "No backend has this name.",
            got=", ".join(unknown),
            allowed=", ".join(sorted(candidates)),
            fix="install the adapter that provides it, or correct the name",
        )
    if named:
        return named
    order = AUTO_ORDER.get(device.arch) or AUTO_ORDER[device.vendor]
    in_tree = {name for names in AUTO_ORDER.values() for name in names}
    thirds = sorted(set(candidates) - in_tree)
    found = [n for n in (*order, *thirds) if _runs(candidates.get(n), device)]
    if not found:
        raise ArgumentError(
            "No installed backend runs on this device.",
            got=device.arch,
            allowed=", ".join(order),
            fix="install one of them; `mla-decode doctor` says what is missing",
        )
    return found


def _runs(candidate: Candidate | None, device: DeviceInfo) -> bool:
    """Whether it serves the device's arch, in more than a simulation."""
    if candidate is None or candidate.backend is None:
        return False
    backend = candidate.backend
    if backend.capability.row(device.arch) is None:
        return False
    return not any(word in backend.evidence(device) for word in _UNREAL)
