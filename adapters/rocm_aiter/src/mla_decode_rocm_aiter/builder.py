"""The builder: a step's index list, its empty rows, and its schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from mla_decode import Mask, QueryLenSupport, Refusal, RefusalCode
from mla_decode.builder import GraphSupport, MLADecodeMetadataBuilder
from mla_decode.device import as_device_info
from mla_decode.dtypes import torch_dtype
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode_rocm_aiter.answers import answers_for
from mla_decode_rocm_aiter.expansion import RowUnits, expand_pages
from mla_decode_rocm_aiter.facts import as_simulated
from mla_decode_rocm_aiter.heads import AiterMLAHelper
from mla_decode_rocm_aiter.library import load_library, refused
from mla_decode_rocm_aiter.metadata import AiterMLAMetadata
from mla_decode_rocm_aiter.ops import Schedule, build_schedule
from mla_decode_rocm_aiter.routes import Block, Route
from mla_decode_rocm_aiter.workspace import index_entries, num_splits, split_counts

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode import DecodeProblem, DeviceInfo
    from mla_decode.builder import Validation


class _Views(NamedTuple):
    """A builder's buffers as one launch shape sees them."""

    indptr: Tensor
    ends: Tensor
    """Of `indptr`, all but the first."""
    is_empty: Tensor
    ones: Tensor


class AiterMLAMetadataBuilder(MLADecodeMetadataBuilder):
    """Uniform blocks under either mask; one instance per ubatch.

    The batch's mask is `_decode_causal`, recorded by `build`; the schedule is built
    with it, and the metadata carries it to the kernel. Buffers are sized for the
    problem's largest batch and keep their addresses; nothing waits for the device.

    Args:
        problem: What the layer group asks.
        device: An assumed device is simulated on the CPU.
        validate: As in the contract.

    Raises:
        BackendRefused: A block of the problem has no kernel: before any buffer exists.
        OutdatedLibraryError: A non-causal block on an AITER that knows no mask.
    """

    query_len_support = QueryLenSupport.UNIFORM
    graph_support = GraphSupport.UNIFORM_BATCH
    supports_non_causal_multi_token_decode = True
    supports_non_causal_multi_token_dcp = True

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        validate: Validation = "host",
    ) -> None:

        described = as_simulated(as_device_info(device))
        self.answers = answers_for(described)
        self.routes = self.answers.routes(problem)
        super().__init__(problem, described, validate=validate)
        self.library = load_library(described)
        if problem.needs_non_causal:
            self.library.require_non_causal()
        self.units = RowUnits.of(problem)
        self.dtype_q = torch_dtype(problem.q_dtype, self.device_info)
        self.dtype_kv = torch_dtype(problem.kv_dtype, self.device_info)
        self._padded_q: Tensor | None = None
        self._padded_o: Tensor | None = None
        self._schedules: dict[tuple[int, int], Schedule] = {}
        self._views: dict[tuple[int, int], _Views] = {}
        self._allocate()

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> AiterMLAMetadata:
        requests = seq_lens_device.shape[0]
        q = self._decode_query_len or int(query_start_loc_cpu.diff().max())
        route = self._route_of(q)
        views = self._views_of(requests, q)
        indptr, ones = views.indptr, views.ones
        torch.cumsum(seq_lens_device, 0, dtype=torch.int32, out=views.ends)
        expand_pages(
            block_table_tensor,
            indptr,
            self._kv_indices,
            max_seq_len=max_seq_len,
            page_size=self.problem.page_size,
            units=self.units,
        )
        behind = self._behind[q, self._decode_causal]
        torch.le(seq_lens_device.view(-1, 1, 1), behind, out=views.is_empty)
        schedule, splits, splits_indptr = None, self.library.cus, None
        if route.keeps_schedule:
            schedule = self._schedule_of(requests, q)
            build_schedule(
                self.library,
                schedule,
                qo_indptr=query_start_loc_device,
                kv_indptr=indptr,
                kv_last_page_lens=ones,
                num_heads=route.heads,
                causal=self._decode_causal,
                query_len=q,
                dtype_q=self.dtype_q,
                dtype_kv=self.dtype_kv,
            )
        else:
            splits, splits_indptr = self._splits_of(requests)
        return AiterMLAMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_seq_len=max_seq_len,
            num_reqs=requests,
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            route=route,
            kv_indptr=indptr,
            kv_indices=self._kv_indices,
            kv_last_page_lens=ones,
            is_empty=views.is_empty,
            schedule=schedule,
            num_kv_splits=splits,
            num_kv_splits_indptr=splits_indptr,
        )

    def padded_query(self, rows: int) -> Tensor:
        """[rows, padded heads, 576]: the builder's, overwritten by the next call."""
        if self._padded_q is None:
            shape = (self._most_rows, self.padded_heads, ROW_WIDTH)
            self._padded_q = torch.empty(shape, dtype=self.dtype_q, device=self.device)
        return self._padded_q[:rows]

    def padded_output(self, rows: int) -> Tensor:
        """[rows, padded heads, 512] bf16: the builder's, overwritten likewise."""
        if self._padded_o is None:
            shape = (self._most_rows, self.padded_heads, LATENT_WIDTH)
            self._padded_o = torch.empty(
                shape, dtype=torch.bfloat16, device=self.device
            )
        return self._padded_o[:rows]

    @property
    def padded_heads(self) -> int:
        """Heads that AITER is given."""
        return next(iter(self.routes.values())).heads

    def _route_of(self, q: int) -> Route:
        """The route of a batch; a block outside the problem is refused, not served."""
        causal = self._decode_causal or q == 1
        route = self.routes.get((q, causal))
        if route is not None:
            return route
        mask = Mask.CAUSAL if causal else Mask.NON_CAUSAL
        found = self.answers.block(Block.of(self.problem, q, mask))
        reasons = [] if isinstance(found, Route) else list(found)
        sized = sorted({length for length, _ in self.routes})
        reasons.append(
            Refusal(
                code=RefusalCode.QUERY_LEN,
                message="the builder was not sized for this block, and a block without "
                "its schedule would lose its mask",
                got=f"{q} tokens, {mask}",
                allowed=f"{sized} tokens under the masks that the problem names",
                fix="name the block's length and mask in the DecodeProblem",
            )
        )
        raise refused(*reasons)

    def _allocate(self) -> None:
        """Everything that a build or a graph reads: made once, never moved."""
        problem, device = self.problem, self.device
        most = problem.max_num_reqs
        self._most_rows = most * problem.max_query_len
        self._kv_indptr = self._int32(most + 1)
        self._kv_indices = self._int32(index_entries(problem))
        self._ones = torch.ones(most, dtype=torch.int32, device=device)
        self._is_empty = torch.zeros(self._most_rows, dtype=torch.bool, device=device)
        self._behind = {
            (q, causal): self._rows_behind(q, causal=causal)
            for q in problem.query_lens
            for causal in (True, False)
        }
        self._buffers = self._schedule_buffers()
        self._splits = self._split_offsets()
        heads, count = torch.arange(self.padded_heads), problem.num_q_heads
        repeats = AiterMLAHelper.repeats(count)
        self.head_stride = max(1, repeats)
        order = heads // repeats if repeats else heads % count
        self.head_order = order.to(device)

    def _int32(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.device)

    def _rows_behind(self, q: int, *, causal: bool) -> Tensor:
        """int32 [1, q, 1]: keys that a token's later siblings hide from it."""
        hidden = range(q - 1, -1, -1) if causal else [0] * q
        rows = torch.tensor(list(hidden), dtype=torch.int32, device=self.device)
        return rows.view(1, q, 1)

    def _views_of(self, requests: int, q: int) -> _Views:
        """The buffers cut to a launch shape, made once: a slice costs as a copy does."""
        found = self._views.get((requests, q))
        if found is None:
            indptr = self._kv_indptr[: requests + 1]
            found = self._views[requests, q] = _Views(
                indptr=indptr,
                ends=indptr[1:],
                is_empty=self._is_empty[: requests * q].view(requests, q, 1),
                ones=self._ones[:requests],
            )
        return found

    def _schedule_buffers(self) -> dict[str, Tensor]:
        """One set of buffers, large enough for every block that keeps a schedule."""
        lengths = sorted({q for (q, _), r in self.routes.items() if r.keeps_schedule})
        largest: dict[str, tuple[int, torch.dtype]] = {}
        for q in lengths:
            for name, (shape, dtype) in self._shapes(self.problem.max_num_reqs, q):
                size = math.prod(shape)
                largest[name] = (max(size, largest.get(name, (0, dtype))[0]), dtype)
        return {
            name: torch.zeros(size, dtype=dtype, device=self.device)
            for name, (size, dtype) in largest.items()
        }

    def _shapes(
        self, requests: int, q: int
    ) -> list[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
        """AITER's own sizes, with the names that the buffers go by."""
        names = (
            "work_meta_data",
            "work_indptr",
            "work_info_set",
            "reduce_indptr",
            "reduce_final_map",
            "reduce_partial_map",
        )
        try:
            found = self.library.metadata_info(
                requests,
                q,
                self.padded_heads,
                self.dtype_q,
                self.dtype_kv,
                is_sparse=False,
                fast_mode=True,
            )
        except AssertionError as error:  # AITER's own, often without a word
            raise refused(self._unsized(requests, q, error)) from error
        return [
            (name, ((shape,) if isinstance(shape, int) else tuple(shape), dtype))
            for name, (shape, dtype) in zip(names, found, strict=True)
        ]

    def _unsized(self, requests: int, q: int, error: AssertionError) -> Refusal:
        heads, padded = self.problem.num_q_heads, self.padded_heads
        return Refusal(
            code=RefusalCode.VERSION,
            message="get_mla_metadata_info_v1 asserts against a schedule that this "
            f"release is known to make: {str(error) or 'without a message'}",
            got=f"AITER {self.library.release}, {requests} requests, {q} tokens, "
            f"{heads} heads ({padded} after padding), {self.dtype_q} q, "
            f"{self.dtype_kv} cache",
            allowed="what the release's profile says",
            fix="reinstall amd-aiter of this version, run `mla-decode probe "
            "rocm_aiter` on the GPU, or use triton_mla",
        )

    def _schedule_of(self, requests: int, q: int) -> Schedule:
        """The buffers as views of one launch shape: the same ones at every build."""
        found = self._schedules.get((requests, q))
        if found is None:
            views = {
                name: self._buffers[name][: math.prod(shape)].view(shape)
                for name, (shape, _) in self._shapes(requests, q)
            }
            found = self._schedules[requests, q] = Schedule(**views)
        return found

    def _split_offsets(self) -> dict[int, Tensor]:
        """Prefix sums of each number of splits that a batch without a schedule gets."""
        if all(route.keeps_schedule for route in self.routes.values()):
            return {}
        most = self.problem.max_num_reqs
        requests = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        return {
            splits: requests * splits for splits in split_counts(self.library.cus, most)
        }

    def _splits_of(self, requests: int) -> tuple[int, Tensor]:
        """Splits per request without a schedule, and their prefix sums."""
        splits = num_splits(self.library.cus, requests)
        return splits, self._splits[splits][: requests + 1]
