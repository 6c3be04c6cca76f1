"""The picture of a run: time, fraction of the copy bandwidth, speed-up over flatten."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_decode.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mla_decode.cli.bench.points import Row

_MOST_NAMES = 16
"""Of a legend: more would leave the lines no room."""


def load_figure() -> Any:
    """Matplotlib's figure class.

    Raises:
        ArgumentError: Matplotlib is not installed; nothing was measured yet.
    """
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ArgumentError(
            "--plot needs matplotlib.",
            got=f"{type(error).__name__}: {error}",
            allowed="matplotlib 3.9 or newer",
            fix="pip install 'mla-decode[plot]'",
        ) from error


def formats() -> frozenset[str]:
    """What a picture's name may end in; `load_figure` has found matplotlib."""
    canvas = import_module("matplotlib.backend_bases").FigureCanvasBase
    return frozenset(canvas.get_supported_filetypes())


def draw(
    figure_cls: Any, rows: Sequence[Row], path: Path, *, title: str, bandwidth: float
) -> None:
    """Write the picture; its format is the file name's.

    Args:
        figure_cls: What `load_figure` gave.
        rows: Refused ones are left out.
        path: Of the picture.
        title: Device, date and evidence.
        bandwidth: GB/s of a copy, which is 1 in the heat map.
    """
    timed = [row for row in rows if row.us is not None]
    figure = figure_cls(figsize=(15, 4.5), layout="constrained")
    figure.suptitle(title)
    times, heat, gains = figure.subplots(1, 3)
    _lines(times, timed, "us")
    times.set(title="Time of a call", ylabel="us", yscale="log")
    _heat(figure, heat, timed, bandwidth)
    _lines(gains, [row for row in timed if row.speed_up], "speed_up")
    gains.axhline(1.0, color="grey", linewidth=0.8)
    gains.set(title="Speed-up over one row a token", ylabel="flatten / block")
    figure.savefig(path)


def _name(row: Row) -> str:
    point = row.point
    mask = "" if point.query_len == 1 else " causal" if point.causal else " non-causal"
    return f"{row.backend} H{point.num_heads} Q{point.query_len}{mask} B{point.batch}"


def _lines(axes: Any, rows: Sequence[Row], field: str) -> None:
    """One line a backend and batch, over seq_len; a trace's steps are dots."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        is_grid = row.point.origin == "grid"
        name = _name(row) if is_grid else f"{row.backend} {row.point.origin}"
        groups.setdefault(name, []).append(
            (row.point.mean_seq_len, getattr(row, field))
        )
    for name, values in groups.items():
        x, y = zip(*sorted(values), strict=True)
        axes.plot(x, y, marker="o", label=name)
    axes.set(xlabel="seq_len", xscale="log")
    if 0 < len(groups) <= _MOST_NAMES:
        axes.legend(fontsize="x-small")


def _heat(figure: Any, axes: Any, rows: Sequence[Row], bandwidth: float) -> None:
    names = list(dict.fromkeys(_name(row) for row in rows))[:40]
    lens = sorted({row.point.mean_seq_len for row in rows})[:40]
    cells = [[float("nan")] * len(lens) for _ in names]
    for row in rows:
        name, seq_len = _name(row), row.point.mean_seq_len
        if name in names and seq_len in lens:
            fraction = (row.kv_gb_s or 0.0) / bandwidth
            cells[names.index(name)][lens.index(seq_len)] = fraction
    if cells:
        image = axes.imshow(cells, aspect="auto", vmin=0, vmax=1)
        figure.colorbar(image, ax=axes)
    axes.set_xticks(range(len(lens)), lens, fontsize="x-small", rotation=45)
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.set(title=f"KV GB/s over a copy's {bandwidth:.0f}", xlabel="seq_len")
