"""One thing that was looked at, and the hook through which backends add theirs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mla_decode.device import DeviceInfo


class Level(str, enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"
    """Worth knowing; something else serves, or it is not needed here."""
    ERROR = "error"
    """Wrong: `mla-decode doctor` exits with 1."""

    def __str__(self) -> str:
        """The word itself."""
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    """One sentence for people."""
    got: str = ""
    """What this machine has: a version, a path, a library's own words."""
    fix: str = ""
    """What the reader can do; empty where nothing is to be done."""

    def as_dict(self) -> dict[str, str]:
        """A plain dictionary, the form that `--json` prints."""
        return {name: str(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Finding:
        """What `as_dict` gave, read in another process."""
        return cls(**{**fields, "level": Level(fields["level"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What was found about one subject: torch, the device, a backend."""

    about: str
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        return {
            "about": self.about,
            "findings": [finding.as_dict() for finding in self.findings],
        }


@runtime_checkable
class Diagnoses(Protocol):
    """A backend that tells the states of its library's installation apart.

    The hook is optional. It runs in a child process of the doctor, and each finding is
    kept as soon as it is yielded: what reads names, files and metadata comes first,
    what imports the library and may die of it comes last.
    """

    def diagnose(self, device: DeviceInfo) -> Iterable[Finding]:
        """What stands where the library should: wrong, shadowed, old, being built.

        Args:
            device: This machine's, or the one that its image is meant for; it is not
                an assumed one, whose library would be simulated.
        """
