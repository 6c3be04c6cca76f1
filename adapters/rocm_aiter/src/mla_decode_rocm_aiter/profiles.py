"""Find the profile of a release by its name."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from packaging.version import Version

from mla_decode_rocm_aiter.releases import PROFILES

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.rules import Profile

DEFAULT_RELEASE = "0.1.20.post1"
"""What simulation, `explain` and `coverage` assume when nothing else is said."""
PINNED_RELEASE = "0.1.21.post2"
"""The release that engines pin their images to."""

_BY_NAME = {name: profile for profile in PROFILES for name in profile.releases}


def known_releases() -> tuple[str, ...]:
    """Names of every release with a profile, oldest first."""
    return tuple(_BY_NAME)


@lru_cache(maxsize=256)
def find_profile(release: str) -> Profile | None:
    """The profile of a release, or None for a release that nobody has read.

    Args:
        release: As `0.1.20.post1`; a leading `v` and a local part (`+rocm7.0`) are
            ignored. A development or pre-release has no profile: it is not the release
            that its number names.
    """
    found = _BY_NAME.get(release)
    if found is not None:
        return found
    try:
        version = Version(release)
    except ValueError:  # no version, or numbers of thousands of digits
        return None
    return _BY_NAME.get(version.public)


def first_release_with_causal() -> str:
    """The first release whose `mla_decode_fwd` takes `causal=`."""
    return next(p.releases[0] for p in PROFILES if p.has_causal_argument)
