"""A reason why a backend cannot serve a problem, as data."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class RefusalCode(str, enum.Enum):
    """Stable codes: tools match on these, people read the message.

    Each knows its usual cause and what usually helps, in Markdown. A refusal's own
    `fix` is more exact.
    """

    cause: str
    remedy: str

    def __new__(cls, code: str, cause: str, remedy: str) -> RefusalCode:  # noqa: PYI034 - no Self on 3.10
        """A member whose value is the code alone."""
        self = str.__new__(cls, code)
        self._value_ = code
        self.cause = cause
        self.remedy = remedy
        return self

    ARCH = (
        "arch",
        (
            "the backend has no kernels for this architecture, in any release that "
            "is known"
        ),
        (
            "use the vendor's own backend, or the portable `triton_mla` if it has the "
            "architecture; on a CPU `reference`"
        ),
    )
    DTYPE = (
        "dtype",
        "no kernel takes this query dtype, or writes this output dtype",
        "cast, or use another backend",
    )
    KV_DTYPE = (
        "kv_dtype",
        "no kernel takes this cache dtype beside this query dtype",
        "choose another cache dtype for the layer group",
    )
    PAGE_SIZE = (
        "page_size",
        "the kernel cannot walk pages of this size",
        "set the cache's page size to an allowed one",
    )
    NUM_HEADS = (
        "num_heads",
        (
            "no kernel for this number of query heads, after the padding that the "
            "adapter does"
        ),
        'change the tensor-parallel size, or `lowering="exact"`',
    )
    QUERY_LEN = (
        "query_len",
        "no kernel for this block length under this mask",
        'another draft length, or `lowering="exact"`',
    )
    MASK = (
        "mask",
        "the backend has no such mask for a block of more than one token",
        '`triton_mla`, or `lowering="exact"`',
    )
    LSE = (
        "lse",
        "the kernel that would serve it returns no log-sum-exp",
        "drop `needs_lse` (and DCP), or another backend",
    )
    DCP = (
        "dcp",
        "the backend cannot serve a rank's share of the KV for this block",
        "run without decode context parallel, or another backend",
    )
    FEATURE = (
        "feature",
        (
            "something else that the problem needs: graphs, a page stride, a size "
            "limit; or a path of the library that is not usable"
        ),
        "the refusal's own `fix` says it",
    )
    WORKSPACE = (
        "workspace",
        "the buffers of the problem's largest batch pass the caller's byte budget",
        (
            "raise `workspace_limit_bytes`, or lower `max_num_reqs`, `max_model_len` "
            "or `max_splits`"
        ),
    )
    DETERMINISM = (
        "determinism",
        (
            "the problem asks for equal bits that the backend does not give: it adds "
            "in another order from run to run, or cuts a request by its neighbours"
        ),
        "another backend, or a problem without `deterministic` or `batch_invariant`",
    )
    DEPENDENCY = (
        "dependency",
        (
            "the kernel library is not there, or another package has its import "
            "name (`aiter` on PyPI is not AMD's)"
        ),
        "install the distribution that the refusal names",
    )
    IMPORT = (
        "import",
        "the adapter or the library does not import",
        (
            "read the error in `got`; a wrong torch build and an ABI mismatch are "
            "the usual ones"
        ),
    )
    VERSION = (
        "version",
        (
            "the installed library is too old or unknown, or the adapter was "
            "written to another contract"
        ),
        ("upgrade what the refusal names, or probe an unknown release on the hardware"),
    )
    DEVICE_ABSENT = (
        "device_absent",
        "the backend was asked to run on hardware that this machine lacks",
        "run it there, or assume the arch, which simulates",
    )
    CHECKER_ERROR = (
        "checker_error",
        "the backend's own check raised: a defect of the adapter",
        "report it to its authors, with the text in `got`",
    )

    def __str__(self) -> str:
        """The code itself, so that f-strings print `mask` and not the member."""
        return str(self.value)


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
