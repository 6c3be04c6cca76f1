"""Has this device non-causal decode? Asked in order: arch, signature, kernel table."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from mla_decode import Refusal
from mla_decode_rocm_aiter.facts import find_facts
from mla_decode_rocm_aiter.library import outdated
from mla_decode_rocm_aiter.releases import PROFILES
from mla_decode_rocm_aiter.tables import packaged_tables

if TYPE_CHECKING:
    from mla_decode import DeviceInfo


@lru_cache(maxsize=32)
def arch_has_non_causal(arch: str) -> bool:
    """Whether any known release ships non-causal decode kernels for an arch.

    gfx950 does from 0.1.20 on; gfx942 has none, and no upgrade would help it.
    """
    tables = packaged_tables()
    return any(
        profile.has_causal_argument
        and arch in profile.tables
        and tables[arch, profile.tables[arch]].has_non_causal_rows()
        for profile in PROFILES
    )


def supports_non_causal(device: DeviceInfo) -> bool:
    """Whether the device's AITER decodes non-causal blocks.

    Raises:
        OutdatedLibraryError: The arch has such kernels in a newer release, and the
            installed `mla_decode_fwd` takes no `causal`. Failing closed: a slower
            backend is never chosen unseen.
    """
    if not arch_has_non_causal(device.arch):
        return False
    facts = find_facts(device)
    if isinstance(facts, Refusal):
        return False
    if not facts.has_causal:
        raise outdated(facts.release)
    return facts.has_non_causal_kernels
