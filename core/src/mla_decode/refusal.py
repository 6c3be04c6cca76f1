"""A reason why a backend cannot serve a problem, as data."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class RefusalCode(str, enum.Enum):
    """Stable codes: tools match on these, people read the message."""

    ARCH = "arch"
    DTYPE = "dtype"
    KV_DTYPE = "kv_dtype"
    PAGE_SIZE = "page_size"
    NUM_HEADS = "num_heads"
    QUERY_LEN = "query_len"
    MASK = "mask"
    LSE = "lse"
    DCP = "dcp"
    FEATURE = "feature"
    DEPENDENCY = "dependency"
    IMPORT = "import"
    VERSION = "version"
    DEVICE_ABSENT = "device_absent"
    CHECKER_ERROR = "checker_error"

    def __str__(self) -> str:
        """The code itself, so that f-strings print `mask` and not the member."""
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One reason: what was asked, what is allowed, and what to do about it."""

    code: RefusalCode
    """Which kind of reason this is."""
    message: str
    """One sentence for people."""
    got: str
    """What the problem or the machine has."""
    allowed: str
    """What the backend would have accepted."""
    fix: str
    """What the reader can do."""

    def as_dict(self) -> dict[str, str]:
        """A plain dictionary, the form that `--json` prints."""
        return {key: str(value) for key, value in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"[{self.code}] {self.message} "
            f"(got {self.got}; allowed: {self.allowed}; fix: {self.fix})"
        )
