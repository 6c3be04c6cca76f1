"""Launches: through Triton's front door once, straight to the driver afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode.mask import Mask
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode_triton.loading import load_kernels
from mla_decode_triton.planning import MERGE_SIZES, plan_step
from mla_decode_triton.variants import DecodeVariant, MergeVariant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from mla_decode.device import DeviceInfo
    from mla_decode.forward_check import CheckedCall
    from mla_decode.problem import DecodeProblem
    from mla_decode_triton.planning import StepPlan
    from mla_decode_triton.tiles import ArchTiles

_LOG2E = 1.4426950408889634
_VECTOR_BYTES = 16
"""What pointers and strides are multiples of for the compiled variants to be valid."""
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundKernel:
    """A kernel variant with its grid, ready to be launched."""

    by_front_door: Callable[..., None]
    """Triton's own launch, which looks at every argument; tensors, by keyword."""
    directly: Callable[..., None] | None
    """The launch of the variant for aligned tensors, which takes addresses by position:
    they spare the driver the question where a tensor lives. None: there is none."""
    keywords: Mapping[str, Any]
    """The constants and the compiler's options, for the front door."""
    values: tuple[Any, ...]
    """Of the constants, in the kernel's order, for the direct launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStep:
    """The launches of every forward of one shape of step."""

    query_len: int
    num_splits: int
    decode: BoundKernel
    merge: BoundKernel | None
    """None where the keys are not split."""


class Launcher:
    """A builder's kernels: compiled at its construction, launched by its forwards.

    Triton looks at every argument of every call to find the variant of a kernel that
    it may use: tens of microseconds. Here the variants of aligned tensors are held, a
    call looks at the alignment alone, and whatever is not aligned takes Triton's way.
    On ROCm every call does: there a variant also depends on the sizes of tensors.

    Args:
        problem: What the steps lie within.
        device: Where they run.
        arch: Its tiles.
        partial_out: float32 [rows, 512], of split requests: the builder's, never moved.
        partial_lse: float32 [rows].
    """

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceInfo,
        arch: ArchTiles,
        *,
        partial_out: Tensor,
        partial_lse: Tensor,
    ) -> None:
        self._problem = problem
        self._arch = arch
        self._device = device
        self._interpreted = device.torch_device == "cpu"
        self._partials = partial_out, partial_lse
        self._partial_addresses = partial_out.data_ptr(), partial_lse.data_ptr()
        self._guards_device = not self._interpreted and torch.cuda.device_count() > 1
        self._kernels = load_kernels(interpreted=self._interpreted)
        self._decode: dict[DecodeVariant, Any] = {}
        self._merge: dict[MergeVariant, Any] = {}
        if device.vendor == "cuda" and not self._interpreted:
            with torch.cuda.device(device.index):
                self._compile()

    def bind(self, plan: StepPlan, *, causal: bool) -> BoundStep:
        """Choose the kernels of a step's shape."""
        problem, interpreted = self._problem, self._interpreted
        query_len = plan.num_rows // problem.num_q_heads
        decode = DecodeVariant.of(
            problem,
            self._arch,
            plan.tile,
            causal=causal and query_len > 1,
            is_split=plan.num_splits > 1,
            tiles_per_split=plan.tiles_per_split,
        )
        kernel, held = self._kernels.decode, self._decode.get(decode)
        bound_decode = self._bind(kernel, held, decode, plan.grid)
        bound_merge = None
        if plan.num_splits > 1:
            merge = MergeVariant(
                max_splits=plan.merge_size, needs_lse=problem.needs_lse
            )
            blocks = LATENT_WIDTH // merge.columns(interpreted=interpreted)
            grid = (plan.num_reqs * plan.num_rows, blocks, 1)
            kernel, held = self._kernels.merge, self._merge.get(merge)
            bound_merge = self._bind(kernel, held, merge, grid)
        return BoundStep(
            query_len=query_len,
            num_splits=plan.num_splits,
            decode=bound_decode,
            merge=bound_merge,
        )

    def launch(
        self, step: BoundStep, call: CheckedCall, table: Tensor, lens: Tensor
    ) -> None:
        """Decode one step on the current stream.

        Args:
            step: The launches of its shape.
            call: Every row of its outputs is written.
            table: int32 [num_reqs, width].
            lens: int32 [num_reqs].
        """
        if self._guards_device and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device.index):
                self._launch(step, call, table, lens)
        else:
            self._launch(step, call, table, lens)

    def _launch(
        self, step: BoundStep, call: CheckedCall, table: Tensor, lens: Tensor
    ) -> None:
        """Straight to the driver where alignment allows, else by the front door."""
        query, rope, cache = call.q, call.q_rope, call.kv_cache
        query_at, cache_at, out_at = (
            query.data_ptr(),
            cache.data_ptr(),
            call.out.data_ptr(),
        )
        token_stride, head_stride, _ = rope_strides = query.stride()
        if rope is None:  # an address needs no view of the query's tail
            rope_at = query_at + LATENT_WIDTH * query.element_size()
        else:
            rope_at, rope_strides = rope.data_ptr(), rope.stride()
        rope_token_stride, rope_head_stride, _ = rope_strides
        page_stride = cache.stride(0)
        numbers = (
            call.softmax_scale * _LOG2E,
            self._problem.num_q_heads,
            step.query_len,
            token_stride,
            head_stride,
            rope_token_stride,
            rope_head_stride,
            page_stride,
            table.stride(0),
            step.num_splits,
        )
        bits = query_at | rope_at | cache_at | out_at | page_stride
        bits |= token_stride | head_stride | rope_token_stride | rope_head_stride
        decode, merge = step.decode, step.merge
        direct = decode.directly
        if (
            direct is None
            or (merge is not None and merge.directly is None)
            or bits % _VECTOR_BYTES
            or page_stride > _INT32_MAX
        ):
            self._launch_by_front_door(step, call, table, lens, numbers)
            return
        partial_out, partial_lse = self._partial_addresses
        lse_at = partial_lse if call.lse is None else call.lse.data_ptr()
        direct(
            query_at,
            rope_at,
            cache_at,
            table.data_ptr(),
            lens.data_ptr(),
            None if call.kv_scale is None else call.kv_scale.data_ptr(),
            out_at if merge is None else partial_out,
            lse_at if merge is None else partial_lse,
            *numbers,
            *decode.values,
        )
        if merge is not None and merge.directly is not None:
            merge.directly(
                partial_out, partial_lse, out_at, lse_at, step.num_splits, *merge.values
            )

    def _launch_by_front_door(
        self,
        step: BoundStep,
        call: CheckedCall,
        table: Tensor,
        lens: Tensor,
        numbers: tuple[Any, ...],
    ) -> None:
        rope = call.q[..., LATENT_WIDTH:] if call.q_rope is None else call.q_rope
        partial_out, partial_lse = self._partials
        lse = partial_lse if call.lse is None else call.lse
        decode, merge = step.decode, step.merge
        keywords = dict(decode.keywords)
        if (call.kv_cache.data_ptr() | call.kv_cache.stride(0)) % 2:
            keywords["PAIRED"] = False  # only fp8 lies at odd addresses
        decode.by_front_door(
            call.q,
            rope,
            call.kv_cache,
            table,
            lens,
            call.kv_scale,
            call.out if merge is None else partial_out,
            lse if merge is None else partial_lse,
            *numbers,
            **keywords,
        )
        if merge is not None:
            merge.by_front_door(
                *(partial_out, partial_lse, call.out, lse, step.num_splits),
                **merge.keywords,
            )

    def _bind(
        self,
        kernel: Any,
        compiled: Any | None,
        variant: DecodeVariant | MergeVariant,
        grid: tuple[int, int, int],
    ) -> BoundKernel:
        constants = variant.constants(interpreted=self._interpreted)
        options = {} if self._interpreted else variant.options
        return BoundKernel(
            by_front_door=kernel[grid],
            directly=None if compiled is None else compiled[grid],
            keywords={**constants, **options},
            values=tuple(constants.values()),
        )

    def _compile(self) -> None:
        """Compile and load what the problem's steps can launch."""
        problem, arch = self._problem, self._arch
        for query_len, mask in problem.blocks():
            plan = plan_step(
                problem,
                arch,
                num_reqs=1,
                query_len=query_len,
                max_seq_len=problem.max_model_len,
            )
            for is_split in (False, True):
                decode = DecodeVariant.of(
                    problem,
                    arch,
                    plan.tile,
                    causal=mask is Mask.CAUSAL and query_len > 1,
                    is_split=is_split,
                    tiles_per_split=plan.tiles_per_split,
                )
                if decode not in self._decode:
                    self._decode[decode] = self._compile_decode(decode)
        for size in MERGE_SIZES:
            merge = MergeVariant(max_splits=size, needs_lse=problem.needs_lse)
            self._merge[merge] = self._compile_merge(merge)

    def _compile_decode(self, variant: DecodeVariant) -> Any:
        """Compile for aligned tensors; the strides stand for any multiple of 16."""
        problem = self._problem
        query = torch_dtype(problem.q_dtype, self._device)
        out = torch_dtype(problem.out_dtype, self._device)
        width = ROW_WIDTH
        compiled = self._kernels.decode.warmup(
            query,
            query,
            torch_dtype(problem.kv_dtype, self._device),
            torch.int32,
            torch.int32,
            torch.float32 if problem.kv_dtype == "fp8" else None,
            torch.float32 if variant.is_split else out,
            torch.float32,
            _LOG2E,
            *(problem.num_q_heads, 1),
            *(width * 16, width, width * 16, width, width * 16),
            *(problem.table_width, 1),
            grid=(1, 1, 1),
            **variant.constants(interpreted=False),
            **variant.options,
        )
        compiled[1, 1, 1]  # loads it: a graph may be the first to launch it
        return compiled

    def _compile_merge(self, variant: MergeVariant) -> Any:
        out = torch_dtype(self._problem.out_dtype, self._device)
        float32 = torch.float32
        compiled = self._kernels.merge.warmup(
            *(float32, float32, out, float32, 1),
            grid=(1, 1, 1),
            **variant.constants(interpreted=False),
            **variant.options,
        )
        compiled[1, 1, 1]  # as above
        return compiled
