"""The builder: one per ubatch, whose `build` is core's and final."""

from __future__ import annotations

import abc
import enum
import inspect
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch

from mla_decode.batch import QueryLenSupport, check_batch
from mla_decode.device import DeviceInfo, as_device_info
from mla_decode.device_validation import check_device_values
from mla_decode.dtypes import torch_dtype
from mla_decode.errors import ArgumentError, BackendRefused
from mla_decode.mask import Mask, normalise_causal
from mla_decode.problem import ROW_WIDTH
from mla_decode.refusal import Refusal, RefusalCode
from mla_decode.stable import StableBuffers

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.batch import BatchShape
    from mla_decode.metadata import CommonAttentionMetadata, DecodeMetadata
    from mla_decode.problem import DecodeProblem

Validation = Literal["host", "device"]

BUILD_DECODE_PARAMETERS = (
    "self",
    "block_table_tensor",
    "seq_lens_device",
    "max_seq_len",
    "query_start_loc_cpu",
    "query_start_loc_device",
    "num_decode_tokens",
    "dcp_tot_seq_lens_device",
)
"""The frozen signature of `_build_decode`: seven parameters, no mask."""


class GraphSupport(enum.IntEnum):
    """Which batches a graph may capture, weakest first."""

    NEVER = 0
    SINGLE_TOKEN = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class MLADecodeMetadataBuilder(abc.ABC):
    """Turns an engine's batch into a backend's metadata.

    One instance per ubatch, used by one thread at a time: the state of the ubatch
    (`_decode_causal`, `_decode_query_len`) lives on the instance, so that a need of
    one platform never becomes a parameter of all.

    Args:
        problem: What the layer group asks. Must lie inside the class attributes.
        device: Where tensors live: a description, a torch device, or its name.
        validate: ``"device"`` also checks tables and lengths on the device, at the
            price of a host-device synchronisation a build. Off by default.

    Raises:
        BackendRefused: The problem is outside what the class declares.
    """

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.SINGLE
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER
    supports_non_causal_multi_token_decode: ClassVar[bool] = False
    supports_non_causal_multi_token_dcp: ClassVar[bool] = False
    host_reads_lengths: ClassVar[bool] = False
    """Whether `build` waits for the device, to read the lengths on the host. Declared,
    it is the one wait that the contract lets pass; `forward` never waits."""
    _splits_causal_blocks: ClassVar[bool] = False
    """Core's lowered builder alone: it gives each row its own local length."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Hold an adapter's class to the contract where it is written."""
        super().__init_subclass__(**kwargs)
        for name in ("build", "build_for_capture"):
            if name in cls.__dict__:
                raise TypeError(
                    f"{cls.__name__}.{name} overrides a final method of the contract: "
                    "implement _build_decode instead"
                )
        written = cls.__dict__.get("_build_decode")
        if written is not None:
            parameters = tuple(inspect.signature(written).parameters)
            if parameters != BUILD_DECODE_PARAMETERS:
                raise TypeError(
                    f"{cls.__name__}._build_decode has parameters {parameters}; the "
                    f"contract froze {BUILD_DECODE_PARAMETERS}: keep what one "
                    "platform needs as state on the builder's instance"
                )

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        validate: Validation = "host",
    ) -> None:
        if not isinstance(validate, str) or validate not in {"host", "device"}:
            raise ArgumentError(
                "validate names no level of validation.",
                got=repr(validate),
                allowed='"host" or "device"',
                fix='leave it out, or pass "device" while you debug a table',
            )
        self.problem = problem
        self.device_info: DeviceInfo = as_device_info(device)
        self.device: torch.device = torch.device(self.device_info.torch_device)
        self.out_dtype: torch.dtype = torch_dtype(problem.out_dtype, self.device_info)
        self.validate = validate
        self.generation: int = 0
        self._decode_causal = True
        self._decode_query_len = 0
        self._require_declared()
        self._starts = self._uniform_starts()
        self._starts_of: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._joined: Tensor | None = None
        self._stable = StableBuffers(problem, self.device) if problem.graphs else None

    @final
    def build(self, common: CommonAttentionMetadata) -> DecodeMetadata:
        """Validate the batch, record its mask, and build the backend's metadata.

        No host-device synchronisation under ``validate="host"``, unless the class
        declares `host_reads_lengths`. The metadata is bound
        to the lengths and the table that it was built from: the next build on this
        builder makes it stale.

        Raises:
            MaskError: ``common.causal`` names no mask.
            BatchError: The batch breaks the contract.
            BackendRefused: Its mask or block length is not one the problem names.
        """
        causal, shape = self._validate(common)
        return self._make(common, shape, causal=causal)

    @final
    def build_for_capture(self, common: CommonAttentionMetadata) -> DecodeMetadata:
        """Build what a graph records: launch shapes depend on nothing of this step.

        They depend on (num_reqs, Q, max_model_len) only, so that a replay after a
        later `build` of the same num_reqs and Q is correct at any lengths.

        Raises:
            BackendRefused: The problem has no graphs, or the batch is of a kind that
                `graph_support` excludes.
        """
        problem = self.problem
        if not problem.graphs:
            raise self._refuse(
                RefusalCode.FEATURE,
                "The problem names no graphs",
                "graphs=False",
                "graphs=True",
                "pass graphs=True in the DecodeProblem of a captured layer group",
            )
        causal, shape = self._validate(common)
        if self.graph_support is not GraphSupport.ALWAYS and not shape.query_len:
            raise self._refuse(
                RefusalCode.FEATURE,
                "A ragged batch cannot be captured here",
                f"query lengths {common.query_start_loc_cpu.diff().tolist()}",
                f"{self.graph_support.name}: uniform batches",
                "capture uniform batches, run ragged ones eagerly",
            )
        return self._make(common, shape, causal=causal)

    @abc.abstractmethod
    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> DecodeMetadata:
        """Build the backend's metadata for one validated step; called by keyword.

        The signature is frozen: no mask among the parameters. An adapter that needs it
        reads ``self._decode_causal``, and the block length ``self._decode_query_len``
        (0 where the batch is ragged).

        Args:
            block_table_tensor: int32 [num_reqs, width] on the device.
            seq_lens_device: int32 [num_reqs] on the device, the block included; 0 for
                pads. Under DCP this rank's lengths.
            max_seq_len: Upper bound of seq_lens; ``max_model_len`` under graphs.
            query_start_loc_cpu: int32 [num_reqs + 1]; uniform blocks, pads too.
            query_start_loc_device: The same on the device.
            num_decode_tokens: Rows of q, out and lse, pads included.
            dcp_tot_seq_lens_device: int32 [num_reqs] global lengths, under DCP.
        """

    def join_query(self, nope: Tensor, rope: Tensor) -> Tensor:
        """Join a query pair into the builder's own buffer and return its rows.

        Args:
            nope: [T, H, 512].
            rope: [T, H, 64], same dtype and device.

        Returns:
            [T, H, 576], overwritten by the builder's next join. The buffer is made for
            the largest batch at the first pair, and keeps its address.
        """
        if self._joined is None:
            problem = self.problem
            rows = problem.max_num_reqs * problem.max_query_len
            self._joined = nope.new_empty((rows, problem.num_q_heads, ROW_WIDTH))
        joined = self._joined[: nope.shape[0]]
        return torch.cat((nope, rope), dim=-1, out=joined)

    def _validate(self, common: CommonAttentionMetadata) -> tuple[bool, BatchShape]:
        """Check a batch; nothing of the builder changes before it has passed."""
        causal = normalise_causal(common.causal)
        shape = check_batch(
            common,
            self.problem,
            causal=causal,
            support=self.query_len_support,
            device=self.device,
            block_starts=self._host_starts,
        )
        return causal, shape

    def _make(
        self, common: CommonAttentionMetadata, shape: BatchShape, *, causal: bool
    ) -> DecodeMetadata:
        """Record a valid batch's state and let the adapter build its metadata."""
        last_page = -1
        if self.validate == "device":
            last_page = check_device_values(common, self.problem, shape, causal=causal)
        query_len = shape.query_len
        if query_len == 1 and not self.supports_non_causal_multi_token_decode:
            causal = True  # a one-token block is both
        self._decode_causal = causal
        self._decode_query_len = query_len
        self.generation += 1
        metadata = self._call_build_decode(common, shape)
        metadata.causal = causal
        metadata.query_len = query_len
        metadata.builder = self
        metadata.generation = self.generation
        metadata.bound = (
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
        )
        metadata.last_page = last_page
        return metadata

    def _call_build_decode(
        self, common: CommonAttentionMetadata, shape: BatchShape
    ) -> DecodeMetadata:
        num_reqs, query_len = shape.num_reqs, shape.query_len
        table = common.block_table_tensor
        if table.shape[0] != num_reqs:
            table = table[:num_reqs]
        lens, totals = common.seq_lens, None
        if common.dcp_local_seq_lens is not None:
            lens, totals = common.dcp_local_seq_lens, common.seq_lens
        if query_len:
            starts_cpu, starts = self.block_starts(num_reqs, query_len)
        else:
            starts_cpu, starts = common.query_start_loc_cpu, common.query_start_loc
        max_seq_len = common.max_seq_len
        if self._stable is not None:
            table, lens, totals = self._stable.fill(table, lens, totals)
            if not query_len:
                starts = self._stable.fill_starts(starts)
            max_seq_len = self.problem.max_model_len
        return self._build_decode(
            block_table_tensor=table,
            seq_lens_device=lens,
            max_seq_len=max_seq_len,
            query_start_loc_cpu=starts_cpu,
            query_start_loc_device=starts,
            num_decode_tokens=shape.num_decode_tokens,
            dcp_tot_seq_lens_device=totals,
        )

    def _uniform_starts(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Block starts of every named Q: constants, so no build computes them."""
        count = torch.arange(self.problem.max_num_reqs + 1, dtype=torch.int32)
        hosts = {
            query_len: count * query_len
            for query_len in sorted(self.problem.query_lens)
        }
        return {
            query_len: (host, host.to(self.device)) for query_len, host in hosts.items()
        }

    def _host_starts(self, num_reqs: int, query_len: int) -> Tensor:
        return self.block_starts(num_reqs, query_len)[0]

    def block_starts(self, num_reqs: int, query_len: int) -> tuple[Tensor, Tensor]:
        """Block starts of a uniform batch, on the host and on the device.

        Views of constants, made once a shape. The block length is one of the problem's.
        """
        views = self._starts_of.get((num_reqs, query_len))
        if views is None:
            host, device = self._starts[query_len]
            views = (host[: num_reqs + 1], device[: num_reqs + 1])
            self._starts_of[num_reqs, query_len] = views
        return views

    def _require_declared(self) -> None:
        """Refuse a problem that the class attributes exclude.

        `supports_non_causal` and `refusals` of the backend say the same and more;
        this is the last gate, for those who build a builder by hand.
        """
        problem = self.problem
        flag = "supports_non_causal_multi_token_decode"
        if problem.dcp is not None:
            flag = "supports_non_causal_multi_token_dcp"
        if problem.needs_non_causal and not getattr(self, flag):
            raise self._refuse(
                RefusalCode.MASK,
                "The builder has no non-causal multi-token decode",
                f"{Mask.NON_CAUSAL} blocks of {sorted(problem.query_lens)} tokens",
                "causal blocks, or one-token blocks",
                'use triton_mla, or opt in to lowering="exact"',
            )
        has_causal_block = any(
            query_len > 1 and mask is Mask.CAUSAL
            for query_len, mask in problem.blocks()
        )
        is_local = problem.dcp is not None and not self._splits_causal_blocks
        if is_local and has_causal_block:
            raise self._refuse(
                RefusalCode.DCP,
                "A causal block under DCP would be masked on rank-local indices",
                f"causal blocks of {sorted(problem.query_lens)} tokens",
                "one-token rows, each with its own local length",
                'opt in to lowering="exact", which splits the block into such rows',
            )
        single = self.query_len_support is QueryLenSupport.SINGLE
        if single and problem.max_query_len > 1:
            raise self._refuse(
                RefusalCode.QUERY_LEN,
                "The builder serves one token a request",
                str(sorted(problem.query_lens)),
                "1",
                'use another backend, or opt in to lowering="exact"',
            )
        weakest = (
            GraphSupport.SINGLE_TOKEN
            if problem.max_query_len == 1
            else GraphSupport.UNIFORM_BATCH
        )
        if problem.graphs and self.graph_support < weakest:
            raise self._refuse(
                RefusalCode.FEATURE,
                "The builder cannot be captured in a graph for these blocks",
                f"graphs=True, blocks of {sorted(problem.query_lens)}",
                self.graph_support.name,
                "run this layer group eagerly, or use another backend",
            )

    def _refuse(
        self, code: RefusalCode, message: str, got: str, allowed: str, fix: str
    ) -> BackendRefused:
        reason = Refusal(code=code, message=message, got=got, allowed=allowed, fix=fix)
        return BackendRefused(
            f"{type(self).__name__} refuses.", {type(self).__name__: [reason]}
        )
