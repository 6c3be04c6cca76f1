"""The contract's version, which is not the distributions'."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

CONTRACT_VERSION = "1.0"


def is_compatible(written_to: str, core: str = CONTRACT_VERSION) -> bool:
    """Whether an adapter written to one contract works with a core of another.

    It does where the major is the same and core's minor is equal or newer.
    """
    try:
        adapter, ours = Version(written_to), Version(core)
    except InvalidVersion:
        return False
    return adapter.major == ours.major and adapter.minor <= ours.minor
