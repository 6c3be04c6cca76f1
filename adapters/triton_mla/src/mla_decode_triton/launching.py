"""Launches: through Triton's front door once, straight to the driver afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode.mask import Mask
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode_triton.loading import load_kernels
from mla_decode_triton.planning import MERGE_SIZES, plan_step
from mla_decode_triton.variants import DecodeVariant, MergeVariant

if TYPE_CHECKING:
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
        self._constants: dict[object, tuple[dict[str, Any], tuple[Any, ...]]] = {}
        self._variants: dict[
            tuple[StepPlan, bool], tuple[DecodeVariant, MergeVariant]
        ] = {}
        if device.vendor == "cuda" and not self._interpreted:
            with torch.cuda.device(device.index):
                self._compile()

    def launch(
        self,
        plan: StepPlan,
        *,
        causal: bool,
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
        decode, merge = self._variants_of(plan, causal)
        is_split = plan.num_splits > 1
        token_stride, head_stride, _ = q_latent.stride()
        rope_token_stride, rope_head_stride, _ = q_rope.stride()
        page_stride = kv_cache.stride(0)
        address_bits = (
            q_latent.data_ptr()
            | q_rope.data_ptr()
            | kv_cache.data_ptr()
            | out.data_ptr()
        )
        stride_bits = (
            token_stride
            | head_stride
            | rope_token_stride
            | rope_head_stride
            | page_stride
        )
        is_aligned = (
            not (address_bits | stride_bits) % _VECTOR_BYTES
            and page_stride <= _INT32_MAX
        )
        arguments = (
            q_latent,
            q_rope,
            kv_cache,
            block_table,
            seq_lens,
            kv_scale,
            partial_out if is_split else out,
            partial_lse if is_split or lse is None else lse,
            softmax_scale * _LOG2E,
            self._problem.num_q_heads,
            plan.num_rows // self._problem.num_q_heads,
            token_stride,
            head_stride,
            rope_token_stride,
            rope_head_stride,
            page_stride,
            block_table.stride(0),
            plan.num_splits,
        )
        with self._on_device():
            self._run(
                self._kernels.decode,
                self._decode.get(decode) if is_aligned else None,
                decode,
                plan.grid,
                arguments,
            )
            if is_split:
                columns = merge.columns(interpreted=self._interpreted)
                self._run(
                    self._kernels.merge,
                    self._merge.get(merge) if is_aligned else None,
                    merge,
                    (plan.num_reqs * plan.num_rows, LATENT_WIDTH // columns, 1),
                    (
                        partial_out,
                        partial_lse,
                        out,
                        partial_lse if lse is None else lse,
                        plan.num_splits,
                    ),
                )

    def _run(
        self,
        kernel: Any,
        compiled: Any | None,
        variant: DecodeVariant | MergeVariant,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
    ) -> None:
        constants, values = self._constants_of(variant)
        if compiled is not None:
            # An address spares the driver the question of where a tensor lives.
            compiled[grid](*map(_address, arguments), *values)
        elif self._interpreted:
            kernel[grid](*arguments, **constants)
        else:
            kernel[grid](*arguments, **constants, **variant.options)

    def _variants_of(
        self, plan: StepPlan, causal: bool
    ) -> tuple[DecodeVariant, MergeVariant]:
        found = self._variants.get((plan, causal))
        if found is None:
            decode = DecodeVariant.of(
                self._problem,
                self._arch,
                plan.tile,
                causal=causal and plan.num_rows > self._problem.num_q_heads,
                is_split=plan.num_splits > 1,
            )
            merge = MergeVariant(
                max_splits=plan.merge_size, needs_lse=self._problem.needs_lse
            )
            found = self._variants[plan, causal] = decode, merge
        return found

    def _constants_of(
        self, variant: DecodeVariant | MergeVariant
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        found = self._constants.get(variant)
        if found is None:
            constants = variant.constants(interpreted=self._interpreted)
            found = self._constants[variant] = constants, tuple(constants.values())
        return found

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
