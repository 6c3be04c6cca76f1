"""Time triton_mla's fp8 tiles against each other and against its bf16 walk, on a GPU.

Each candidate takes the place of the fp8 tiles that the product has; nothing else
changes. A request's output is compared with float64 over the dequantised cache.

    python benchmarks/triton_fp8_tiles.py [--out FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from batches import SCALE
from triton_mla import Bench, common_of, problem_of

from mla_decode import Mask, detect_device
from mla_decode_triton import TritonMLABackend
from mla_decode_triton import builder as builder_module
from mla_decode_triton.builder import TritonMLAMetadataBuilder
from mla_decode_triton.tiles import ARCH_TILES, Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from triton_mla import Case

PORTABLE = TritonMLABackend()
KV_SCALE = 0.5


def _paired(rows: int, tokens: int, warps: int, stages: int, residents: int) -> Tile:
    return Tile(
        rows=rows,
        tokens=tokens,
        num_warps=warps,
        stages=stages,
        residents=residents,
        paired=True,
    )


def _held(tile: Tile, registers: int) -> Tile:
    return replace(tile, max_registers=registers)


NARROW = (
    _paired(16, 32, 4, 3, 2),
    _paired(16, 32, 4, 4, 2),
    _held(_paired(16, 32, 4, 3, 3), 168),
    _held(_paired(16, 32, 4, 4, 3), 168),
    _held(_paired(16, 32, 4, 3, 4), 128),
    _held(_paired(16, 64, 8, 3, 2), 128),
    _paired(16, 64, 8, 3, 1),
    _paired(16, 64, 4, 2, 2),
    _paired(16, 64, 4, 3, 2),
)
"""For up to 16 rows."""
WIDE = (
    Tile(rows=64, tokens=64, num_warps=8, stages=3, detached=True),
    _paired(32, 64, 8, 2, 1),
    _paired(32, 64, 8, 3, 1),
    _paired(32, 32, 8, 3, 1),
    _held(_paired(32, 32, 8, 3, 2), 128),
    _held(_paired(32, 64, 8, 3, 2), 128),
    _held(_paired(16, 32, 4, 3, 3), 168),
)
"""For 64 rows."""
POINTS = {
    NARROW: (
        (16, 1, 64, 16384),
        (16, 1, 128, 4096),
        (16, 1, 16, 16384),
        (16, 1, 16, 4096),
        (16, 1, 1, 65536),
        (16, 1, 1, 4096),
        (16, 1, 1, 1024),
    ),
    WIDE: ((16, 4, 64, 16384), (16, 4, 16, 16384), (16, 4, 16, 4096), (16, 4, 1, 4096)),
}


@contextmanager
def fp8_tiles(arch: str, *tiles: Tile) -> Iterator[None]:
    """Builders made within use these tiles for an fp8 cache."""
    ours = replace(ARCH_TILES[arch], fp8_tiles=tiles)
    builder_module.ARCH_TILES = {**ARCH_TILES, arch: ours}
    try:
        yield
    finally:
        builder_module.ARCH_TILES = ARCH_TILES


def step_of(case: Case) -> tuple[Callable[[], object], torch.Tensor, str]:
    """A forward, where it writes, and what its kernel occupies."""
    problem = replace(problem_of(case), masks=frozenset({Mask.NON_CAUSAL}))
    builder = TritonMLAMetadataBuilder(problem, detect_device())
    metadata = builder.build(common_of(case))
    out = torch.empty(case.q.shape[0], case.heads, 512, dtype=torch.bfloat16).cuda()
    scale = torch.full((1,), KV_SCALE, device="cuda")
    splits = metadata.step.num_splits
    compiled = next(
        kernel
        for variant, kernel in builder.launcher._decode.items()  # noqa: SLF001 - to report what is launched
        if variant.is_split == (splits > 1)
    )
    footprint = (
        f"splits {splits} registers {compiled.n_regs} spills {compiled.n_spills} "
        f"shared {compiled.metadata.shared}"
    )
    kv_scale = scale if case.kv_dtype == "fp8" else None
    return (
        lambda: PORTABLE.forward(
            case.q,
            case.pool,
            metadata,
            softmax_scale=SCALE,
            kv_scale=kv_scale,
            out=out,
        ),
        out,
        footprint,
    )


def error_of(case: Case, out: torch.Tensor) -> float:
    """Relative error of the last request's rows against float64."""
    pages = case.table[-1].long()
    keys = case.pool[pages].double().reshape(-1, 576)[: case.seq_len]
    if case.kv_dtype == "fp8":
        keys = keys * KV_SCALE
    q = case.q[-case.query_len :].double().reshape(-1, 576)
    weights = torch.softmax(q @ keys.T * SCALE, -1)
    truth = weights @ keys[:, :512]
    found = out[-case.query_len :].double().reshape(-1, 512)
    return ((found - truth).norm() / truth.norm()).item()


def main() -> None:
    """Measure and print a line a candidate and point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--quick", action="store_true", help="two points a class")
    options = parser.parse_args()
    arch = detect_device().arch
    bench = Bench()
    lines = []
    for candidates, points in POINTS.items():
        for point in points[: 2 if options.quick else None]:
            for tile in (None, *candidates):
                case = bench.case(point, "bf16" if tile is None else "fp8")
                with fp8_tiles(arch, *(() if tile is None else (tile,))):
                    step, out, footprint = step_of(case)
                times = [bench.time_us(step) for _ in range(2)]
                name = "bf16" if tile is None else name_of(tile)
                line = {
                    "point": point,
                    "tile": name,
                    "us": round(min(times), 2),
                    "us_again": round(statistics.fmean(times), 2),
                    "error": error_of(case, out),
                    "footprint": footprint,
                }
                lines.append(line)
                print(
                    f"{point!s:22} {name:34} {line['us']:8.2f} us "
                    f"error {line['error']:.1e} {footprint}",
                    flush=True,
                )
    if options.out:
        options.out.write_text("\n".join(map(json.dumps, lines)) + "\n")


def name_of(tile: Tile) -> str:
    """A tile in a word."""
    way = "paired" if tile.paired else "detached" if tile.detached else "plain"
    held = "" if tile.max_registers is None else f" max{tile.max_registers}"
    return (
        f"{tile.rows}x{tile.tokens} w{tile.num_warps} s{tile.stages} "
        f"r{tile.residents} {way}{held}"
    )


if __name__ == "__main__":
    main()
