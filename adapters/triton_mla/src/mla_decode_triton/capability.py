"""What the kernels serve, by architecture: wherever they compile within its limits."""

from __future__ import annotations

from mla_decode.capability import (
    Capability,
    CapabilityRow,
    Feature,
    Source,
    Support,
)
from mla_decode.mask import Mask
from mla_decode_triton.tiles import ARCH_TILES, ArchTiles

MAX_HEADS = 128
MAX_QUERY_LEN = 32
PAGE_SIZES = frozenset({1, 16, 32, 64, 128})
MAX_NUM_REQS = 65535
"""The third axis of a grid."""


def _row(tiles: ArchTiles) -> CapabilityRow:
    dtypes = {("bf16", "bf16"), ("fp16", "fp16")}
    if tiles.fp8_tiles:
        dtypes.add(("bf16", "fp8"))
    lengths = range(1, MAX_QUERY_LEN + 1)
    return CapabilityRow(
        arch=tiles.arch,
        dtypes=frozenset(dtypes),
        out_dtypes=frozenset({"bf16", "fp16", "fp32"}),
        page_sizes=PAGE_SIZES,
        num_q_heads=range(1, MAX_HEADS + 1),
        query_lens={Mask.CAUSAL: lengths, Mask.NON_CAUSAL: lengths},
        features={
            Feature.LSE: Support.YES,
            Feature.DCP: Support.YES,
            Feature.GRAPHS: Support.YES,
            Feature.PAGE_STRIDE: Support.YES,
            Feature.SPLIT_CAP: Support.YES,
            Feature.BATCH_INVARIANCE: Support.YES,
        },
        source=Source.DECLARED,
        max_num_reqs=MAX_NUM_REQS,
    )


CAPABILITY = Capability(rows=tuple(map(_row, ARCH_TILES.values())))
