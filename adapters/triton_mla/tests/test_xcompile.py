"""Compiled without a GPU, within what each architecture has."""

import dataclasses

import pytest

from mla_decode_triton import xcompile
from mla_decode_triton.listing import Footprint
from mla_decode_triton.tiles import ARCH_TILES
from mla_decode_triton.variants import DecodeVariant

FITTING = Footprint(
    shared_bytes=1024, registers=64, spilled_bytes=0, matrix_instructions=8
)


def is_decode(target):
    return isinstance(target.variant, DecodeVariant)


def first_target(arch, kv_dtype):
    return next(
        target
        for target in xcompile.targets(arch, is_quick=True)
        if target.kv_dtype == kv_dtype
    )


@pytest.mark.parametrize(
    ("arch", "kv_dtype"), [("gfx942", "bf16"), ("gfx950", "fp8"), ("sm_90", "bf16")]
)
def test_a_kernel_fits(arch, kv_dtype):
    footprint = xcompile.compile_target(first_target(arch, kv_dtype))
    assert footprint.faults(ARCH_TILES[arch], needs_matrix=True) == []
    assert footprint.spilled_bytes == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCH_TILES)
def test_every_tile_fits(arch):
    assert xcompile.main(["--arch", arch, "--quick"]) == 0


@pytest.mark.parametrize("arch", ARCH_TILES)
def test_the_grid_names_every_tile_once_a_mode(arch):
    tiles = ARCH_TILES[arch]
    grid = list(xcompile.targets(arch, is_quick=False))
    assert len(set(map(str, grid))) == len(grid)
    decodes = [target for target in grid if is_decode(target)]
    pairs = 2 * len(tiles.tiles) + len(tiles.fp8_tiles)
    assert len(decodes) == pairs * 3 * 2 * 2
    assert {t.variant.tile for t in decodes} == {*tiles.tiles, *tiles.fp8_tiles}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"shared_bytes": 65537}, "shared 65537 > 65536 bytes"),
        ({"spilled_bytes": 1}, "spills 1 bytes a thread"),
        ({"matrix_instructions": 0}, "none of v_mfma"),
    ],
)
def test_says_what_does_not_fit(change, fault):
    footprint = dataclasses.replace(FITTING, **change)
    assert footprint.faults(ARCH_TILES["gfx942"], needs_matrix=True) == [fault]
    assert FITTING.faults(ARCH_TILES["gfx942"], needs_matrix=True) == []


def test_exits_1_where_a_kernel_does_not_fit(monkeypatch, capsys):
    too_large = dataclasses.replace(FITTING, shared_bytes=1 << 20)
    monkeypatch.setattr(xcompile, "compile_target", lambda _: too_large)
    assert xcompile.main(["--arch", "gfx950", "--quick"]) == 1
    assert "FAILED gfx950 decode 16x32" in capsys.readouterr().out


def test_exits_4_on_an_architecture_that_it_does_not_know(capsys):
    assert xcompile.main(["--arch", "gfx1"]) == 4
    assert "gfx1" in capsys.readouterr().err
