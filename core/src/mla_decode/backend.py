"""What a backend is: a light object behind an entry point."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    ClassVar,
    NamedTuple,
    Protocol,
    runtime_checkable,
)

from mla_decode.forward_check import CheckedCall, check_forward
from mla_decode.version import CONTRACT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.capability import Capability
    from mla_decode.device import DeviceInfo
    from mla_decode.metadata import DecodeMetadata
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal

    Query = Tensor | tuple[Tensor, Tensor]


class DecodeOutput(NamedTuple):
    """What a decode call returns; both tensors are the caller's where it passed them."""

    out: Tensor
    """[tokens, H, 512] in the problem's ``out_dtype``."""
    lse: Tensor | None
    """float32 [tokens, H], natural logarithm; None unless the problem needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one step of the problem's largest batch costs: the planner ranks by it."""

    kv_walks: int
    """Passes over a request's KV by one call."""
    rows: int
    """Query rows that the kernel computes for one request, pads included."""
    launches: int
    """Device kernels of one forward."""
    workspace_bytes: int
    """Device memory that the backend's builder holds, beside what core's part of every
    builder does: exact, whether it is made at construction or at first use."""
    index_entries: int = 0
    """Entries of index lists that a build writes."""
    call_bytes: int = 0
    """Device memory that the library allocates by itself inside one build or forward,
    outputs not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CliOption:
    """An option that a backend adds to `explain`, `coverage` and other commands."""

    name: str
    """With its dashes: ``--aiter-release``."""
    help: str
    default: str | None
    apply: Callable[[DeviceInfo, str], DeviceInfo]
    """Turns the assumed device into one with the option's value applied."""


@runtime_checkable
class Backend(Protocol):
    """The contract's view of a kernel library.

    Importing the object must not import torch kernels or the vendor's library, nor
    touch a GPU.
    """

    def __hash__(self) -> int:
        """Plans are cached by problem, backend and device."""

    @property
    def name(self) -> str:
        """The entry point's name."""

    @property
    def contract(self) -> str:
        """The contract version that the adapter was written to, such as ``1.0``."""

    @property
    def capability(self) -> Capability:
        """What the backend serves, as plain data."""

    @property
    def deterministic(self) -> bool:
        """Whether the same inputs give bit-equal results."""

    @property
    def cli_options(self) -> tuple[CliOption, ...]:
        """Options that the backend adds to the command line."""

    @property
    def builder_cls(self) -> type[MLADecodeMetadataBuilder]:
        """The builder class; reading it may import torch kernels."""

    def refusals(self, problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
        """Every reason why it cannot serve the problem on the device; empty: it can."""

    def supports_non_causal(self, device: DeviceInfo) -> bool:
        """Whether it has non-causal multi-token decode on the device.

        Raises:
            OutdatedLibraryError: A newer release of its library would have.
        """

    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> Cost:
        """What an accepted problem costs."""

    def workspace_bytes(self, problem: DecodeProblem, device: DeviceInfo) -> int:
        """The same number as the cost's: what a builder of this problem will hold."""

    def evidence(self, device: DeviceInfo) -> str:
        """What ran where, in a word or two: ``reference``, ``never on AMD``..."""

    def forward(
        self,
        q: Query,
        kv_cache: Tensor,
        metadata: DecodeMetadata,
        *,
        softmax_scale: float,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> DecodeOutput:
        """Attend each query token over the cached latents of its own request."""


class BackendBase(abc.ABC):
    """The common half of a backend: arguments checked, outputs allocated.

    An adapter may implement `Backend` without it; whoever derives from it writes
    `_forward` and gets the clauses SCALE, STALE, OUT and VALIDATE from core.
    """

    name: str
    contract: ClassVar[str] = CONTRACT_VERSION
    deterministic: bool = True
    cli_options: ClassVar[tuple[CliOption, ...]] = ()
    takes_query_pair: ClassVar[bool] = False
    """Whether `_forward` reads (nope, rope) apart; else core joins them."""

    @property
    @abc.abstractmethod
    def capability(self) -> Capability:
        """What the backend serves: a class attribute where it is known in advance."""

    @property
    @abc.abstractmethod
    def builder_cls(self) -> type[MLADecodeMetadataBuilder]:
        """The builder class; reading it may import torch kernels."""

    def refusals(self, problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
        """Every reason, from the capability's rows; adapters add their own."""
        return self.capability.refusals(problem, device)

    @abc.abstractmethod
    def supports_non_causal(self, device: DeviceInfo) -> bool:
        """Whether it has non-causal multi-token decode on the device."""

    @abc.abstractmethod
    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> Cost:
        """What an accepted problem costs."""

    def workspace_bytes(self, problem: DecodeProblem, device: DeviceInfo) -> int:
        """Bytes of device memory that a builder of this problem will hold."""
        return self.cost(problem, device).workspace_bytes

    @abc.abstractmethod
    def evidence(self, device: DeviceInfo) -> str:
        """What ran where, in a word or two."""

    def forward(
        self,
        q: Query,
        kv_cache: Tensor,
        metadata: DecodeMetadata,
        *,
        softmax_scale: float,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> DecodeOutput:
        """Attend each query token over the cached latents of its own request.

        Symbols: T rows (num_reqs * Q, pads included), H query heads on this rank,
        P pages, S tokens a page.

        Args:
            q: [T, H, 576] in the problem's q_dtype, last axis contiguous, latent part
                first; or the pair (nope [T, H, 512], rope [T, H, 64]). Rows of pads
                are never read.
            kv_cache: [P, S, 576], inner two axes contiguous, the page stride as the
                problem declares. An fp8 cache may be uint8. Slots past a request's
                length are never read: they may hold NaN.
            metadata: The newest metadata of a builder of this backend. Shared by all
                layers of the step.
            softmax_scale: Multiplies q.k before the softmax. No default: the model's
                value comes from the un-absorbed head width (192 for DeepSeek-V3).
            q_scale: float32 [1] on the device, required where q is fp8.
            kv_scale: float32 [1] on the device, required where the cache is fp8.
            out: Filled in place and returned; allocated where None.
            lse: The same, float32 [T, H]; only where the problem needs it.

        Returns:
            ``out`` [T, H, 512] and ``lse`` or None. A row with no key gets out = 0 and
            lse = -inf.

        Raises:
            ArgumentError: A tensor or scale breaks the contract.
            StaleMetadataError: The metadata is not the builder's newest, or a tensor
                has another geometry than the problem's.
        """
        call = check_forward(
            self.builder_cls,
            q,
            kv_cache,
            metadata,
            softmax_scale,
            q_scale,
            kv_scale,
            out,
            lse,
            keep_pair=self.takes_query_pair,
        )
        self._forward(call)
        return DecodeOutput(call.out, call.lse)

    @abc.abstractmethod
    def _forward(self, call: CheckedCall) -> None:
        """Fill ``call.out`` and ``call.lse``, every row, from a checked call.

        An adapter whose library allocates its outputs assigns them instead, unless
        ``call.callers_out`` or ``call.callers_lse`` is there to be filled.
        """
