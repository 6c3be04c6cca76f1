"""Launches: through Triton's front door once, straight to the driver afterwards."""

from __future__ import annotations

from contextlib import nullcontext
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
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from mla_decode.device import DeviceInfo
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

    kernel: Any
    """Triton's own function, which looks at every argument."""
    compiled: Any | None
    """The variant for aligned tensors; None where there is none to hold."""
    grid: tuple[int, int, int]
    constants: Mapping[str, Any]
    values: tuple[Any, ...]
    """Of the constants, in the kernel's order."""
    options: Mapping[str, Any]

    def run(self, arguments: tuple[Any, ...], *, is_aligned: bool) -> None:
        """Launch on the current stream."""
        if is_aligned and self.compiled is not None:
            # An address spares the driver the question of where a tensor lives.
            self.compiled[self.grid](*map(_address, arguments), *self.values)
        else:
            self.kernel[self.grid](*arguments, **self.constants, **self.options)


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
    """

    def __init__(
        self, problem: DecodeProblem, device: DeviceInfo, arch: ArchTiles
    ) -> None:
        self._problem = problem
        self._arch = arch
        self._device = device
        self._interpreted = device.torch_device == "cpu"
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
        self,
        step: BoundStep,
        *,
        q_latent: Tensor,
        q_rope: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        kv_scale: Tensor | None,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor | None,
        partial_out: Tensor,
        partial_lse: Tensor,
    ) -> None:
        """Decode one step on the current stream; see the kernels for shapes."""
        token_stride, head_stride, _ = q_latent.stride()
        rope_token_stride, rope_head_stride, _ = q_rope.stride()
        page_stride = kv_cache.stride(0)
        bits = (
            q_latent.data_ptr()
            | q_rope.data_ptr()
            | kv_cache.data_ptr()
            | out.data_ptr()
            | token_stride
            | head_stride
            | rope_token_stride
            | rope_head_stride
            | page_stride
        )
        is_aligned = not bits % _VECTOR_BYTES and page_stride <= _INT32_MAX
        is_split = step.merge is not None
        some_lse = partial_lse if lse is None else lse
        arguments = (
            q_latent,
            q_rope,
            kv_cache,
            block_table,
            seq_lens,
            kv_scale,
            partial_out if is_split else out,
            partial_lse if is_split else some_lse,
            softmax_scale * _LOG2E,
            self._problem.num_q_heads,
            step.query_len,
            token_stride,
            head_stride,
            rope_token_stride,
            rope_head_stride,
            page_stride,
            block_table.stride(0),
            step.num_splits,
        )
        with self._on_device():
            step.decode.run(arguments, is_aligned=is_aligned)
            if step.merge is not None:
                partials = (partial_out, partial_lse, out, some_lse, step.num_splits)
                step.merge.run(partials, is_aligned=is_aligned)

    def _bind(
        self,
        kernel: Any,
        compiled: Any | None,
        variant: DecodeVariant | MergeVariant,
        grid: tuple[int, int, int],
    ) -> BoundKernel:
        constants = variant.constants(interpreted=self._interpreted)
        return BoundKernel(
            kernel=kernel,
            compiled=compiled,
            grid=grid,
            constants=constants,
            values=tuple(constants.values()),
            options={} if self._interpreted else variant.options,
        )

    def _on_device(self) -> AbstractContextManager[object]:
        index = self._device.index
        if self._interpreted or torch.cuda.current_device() == index:
            return nullcontext()
        return torch.cuda.device(index)

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


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
