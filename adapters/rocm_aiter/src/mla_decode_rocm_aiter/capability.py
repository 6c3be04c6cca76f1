"""What the adapter declares, arch by arch; holes within it are `refusals`' to name."""

from __future__ import annotations

from mla_decode import Capability, CapabilityRow, Feature, Mask, Source, Support

_FEATURES = {
    Feature.LSE: Support.YES,
    Feature.DCP: Support.YES,
    Feature.GRAPHS: Support.YES,
    Feature.PAGE_STRIDE: Support.YES,
}
_DTYPES = frozenset({("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8")})
LONGEST_BLOCK = 64
"""Query tokens up to which the dispatch rules were compared with AITER's own code."""


def _row(arch: str, query_lens: dict[Mask, range]) -> CapabilityRow:
    return CapabilityRow(
        arch=arch,
        dtypes=_DTYPES,
        out_dtypes=frozenset({"bf16"}),
        page_sizes=range(1, (1 << 16) + 1),
        num_q_heads=range(1, 129),
        query_lens=query_lens,
        features=_FEATURES,
        source=Source.PROFILE,
    )


CAPABILITY = Capability(
    rows=(
        _row("gfx942", {Mask.CAUSAL: range(1, LONGEST_BLOCK + 1)}),
        _row(
            "gfx950",
            {
                Mask.CAUSAL: range(1, LONGEST_BLOCK + 1),
                Mask.NON_CAUSAL: range(2, LONGEST_BLOCK + 1),
            },
        ),
    )
)
"""gfx942 has no non-causal row: no release ships a kernel for it."""
