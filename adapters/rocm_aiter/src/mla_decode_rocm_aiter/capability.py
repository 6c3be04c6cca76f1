"""What the adapter declares, arch by arch; holes within it are `refusals`' to name."""

from __future__ import annotations

from functools import lru_cache

from mla_decode import (
    Capability,
    CapabilityRow,
    Feature,
    Mask,
    Refusal,
    Source,
    Support,
)
from mla_decode_rocm_aiter.installation import find_installation, simulated_release
from mla_decode_rocm_aiter.profiles import DEFAULT_RELEASE, find_profile
from mla_decode_rocm_aiter.simulation import read_variable
from mla_decode_rocm_aiter.tables import ARCHS, packaged_tables

_DTYPES = frozenset({("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8")})
LONGEST_BLOCK = 64
"""Query tokens up to which the dispatch rules were compared with AITER's own code."""


def _row(
    arch: str, *, non_causal: bool, has_lse: bool, source: Source
) -> CapabilityRow:
    query_lens = {Mask.CAUSAL: range(1, LONGEST_BLOCK + 1)}
    if non_causal:
        query_lens[Mask.NON_CAUSAL] = range(2, LONGEST_BLOCK + 1)
    lse = Support.YES if has_lse else Support.NEEDS_VERSION
    return CapabilityRow(
        arch=arch,
        dtypes=_DTYPES,
        out_dtypes=frozenset({"bf16"}),
        page_sizes=range(1, (1 << 16) + 1),
        num_q_heads=range(1, 129),
        query_lens=query_lens,
        features={
            Feature.LSE: lse,
            Feature.DCP: lse,
            Feature.GRAPHS: Support.YES,
            Feature.PAGE_STRIDE: Support.YES,
        },
        source=source,
    )


@lru_cache(maxsize=64)
def capability_of(release: str) -> Capability:
    """What a release serves; a release that nobody has read counts as the newest one.

    gfx942 has no non-causal row in any: no release ships a kernel for it.
    """
    profile = find_profile(release) or find_profile(DEFAULT_RELEASE)
    if profile is None:
        raise LookupError(DEFAULT_RELEASE)
    source = Source.DECLARED if profile.evidence == "declared" else Source.PROFILE
    rows = []
    for arch in ARCHS:
        table = packaged_tables()[arch, profile.tables[arch]]
        rows.append(
            _row(
                arch,
                non_causal=profile.has_causal_argument and table.has_non_causal_rows(),
                has_lse=profile.lse_key_needs_schedule
                or any(row.lse for row in table.rows),
                source=source,
            )
        )
    return Capability(rows=tuple(rows))


CAPABILITY = capability_of(DEFAULT_RELEASE)
"""What the newest release that was read serves: beyond it lies no reason to ask."""


def present_release() -> str:
    """The release in sight: simulated, asked for by the variable, or installed.

    Reads names and files, and imports nothing.
    """
    simulated = simulated_release() or read_variable()
    if simulated is not None:
        return simulated[1]
    found = find_installation()
    return DEFAULT_RELEASE if isinstance(found, Refusal) else found.version
