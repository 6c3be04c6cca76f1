"""What a call owes after the library's: the LSE of rows without keys, the caller's out.

The library's LSE is called [B, H, Q] and lies in memory as [B, Q, H]: the contract's
order, by a view. What remains is to turn +inf into -inf and to copy the output where
the caller wants it: one small kernel of Triton's, which comes with a CUDA torch, or
torch's own operators where there is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from subprocess import CalledProcessError
from typing import TYPE_CHECKING

import torch
from packaging.version import Version

from mla_decode.dtypes import torch_dtype
from mla_decode_cuda_flashmla.launching import Launcher, hooks_are_set

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem
    from mla_decode_cuda_flashmla.launching import Launch

_NAN, _INF = math.nan, math.inf
_OLDEST_TRITON = Version("3.6")
BLOCK_ROWS = {False: 512, True: 8}
"""Rows of a program, by whether it copies 512 columns of each."""


@dataclass(slots=True, kw_only=True, eq=False)
class Finish:
    """The launches that end the calls of one batch's shape.

    They are valid for the answers of a library of which `takes` was true once: their
    layout is a matter of its code and of the shape.
    """

    mark: Launch
    """Writes the LSE, which may be the library's own; outputs may be at 0."""
    copy: Launch
    """Writes the LSE and the output, both of which lie at multiples of 16 bytes."""
    takes_answers: bool = False
    """Whether `takes` was true."""

    def takes(self, found: Tensor, found_lse: Tensor) -> bool:
        """Whether the kernel is valid for the library's answers of this shape."""
        self.takes_answers = found.is_contiguous() and lies_in_order(found_lse)
        return self.takes_answers


class Finisher:
    """The compiled kernels, launched by addresses.

    Args:
        kernels: By whether they copy the output: made for aligned outputs.
    """

    def __init__(self, kernels: Mapping[bool, Launcher]) -> None:
        self._kernels = kernels
        self._finishes: dict[tuple[int, int, bool], Finish] = {}

    def for_batch(self, num_reqs: int, num_rows: int) -> Finish:
        """The launches for requests of Q*H rows each; a profiler that listens hears."""
        key = num_reqs, num_rows, hooks_are_set()
        found = self._finishes.get(key)
        if found is None:
            mark, copy = (self._bind(copies, *key) for copies in (False, True))
            found = self._finishes[key] = Finish(mark=mark, copy=copy)
        return found

    def _bind(
        self, copies: bool, num_reqs: int, num_rows: int, is_heard: bool
    ) -> Launch:
        kernel, block = self._kernels[copies], BLOCK_ROWS[copies]
        bind = kernel.by_triton if is_heard else kernel.directly
        total = num_reqs * num_rows
        return bind((-(-total // block), 1, 1), (total, copies, block))

    @classmethod
    def of(
        cls, problem: DecodeProblem, device: DeviceInfo
    ) -> tuple[Finisher | None, str]:
        """Compile for a problem; None and the reason where torch's operators do it.

        Those do it on an assumed device and where no LSE is asked for, which needs no
        reason, and where Triton is absent, old, or cannot compile here: it needs a C
        compiler to build its launches with.
        """
        if device.assumed or not problem.needs_lse:
            return None, ""
        try:
            import triton  # noqa: PLC0415 - optional, and not needed without LSE
            from triton.errors import TritonError  # noqa: PLC0415 - as above
        except ImportError as error:
            return None, f"no finishing kernel: {error}"
        if Version(triton.__version__) < _OLDEST_TRITON:
            return None, f"no finishing kernel: triton {triton.__version__} is too old"
        out = torch_dtype(problem.out_dtype, device)
        try:
            with torch.cuda.device(device.index):
                kernels = {copies: _compile(out, copies) for copies in BLOCK_ROWS}
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # the device's own trouble, which torch's operators would meet too
        except (OSError, RuntimeError, TritonError, CalledProcessError) as error:
            return None, f"no finishing kernel: {type(error).__name__}: {error}"
        return cls(kernels), ""


def _compile(out: torch.dtype, copies: bool) -> Launcher:
    from mla_decode_cuda_flashmla.finish_kernel import (  # noqa: PLC0415 - imports Triton
        finish_kernel,
    )

    compiled = finish_kernel.warmup(
        *(torch.float32, torch.float32, out, out, 1),
        grid=(1, 1, 1),
        COPIES_OUT=copies,
        BLOCK_ROWS=BLOCK_ROWS[copies],
        num_warps=4,
    )
    compiled[1, 1, 1]  # loads it: a graph may be the first to launch it
    return Launcher(compiled)


def lies_in_order(lse: Tensor) -> bool:
    """Whether a [B, H, Q] lies in memory as [B, Q, H], as the library's do."""
    requests, heads, query_len = lse.shape
    by_request, by_head, by_token = lse.stride()
    return (
        (by_head == 1 or heads == 1)
        and (by_token == heads or query_len == 1)
        and (by_request == heads * query_len or requests == 1)
    )


def in_order(lse: Tensor) -> Tensor:
    """A [B, H, Q] that lies in order as (B*Q, H): the same memory."""
    requests, heads, query_len = lse.shape
    return lse.as_strided((requests * query_len, heads), (heads, 1))


def lse_by_torch(lse: Tensor, target: Tensor | None) -> Tensor:
    """The library's [B, H, Q] as (B*Q, H), -inf for rows without keys: one kernel."""
    if lies_in_order(lse):
        rows = in_order(lse)
        if target is None:
            return torch.nan_to_num_(rows, _NAN, -_INF, -_INF)
        return torch.nan_to_num(rows, _NAN, -_INF, -_INF, out=target)
    requests, heads, query_len = lse.shape
    if target is None:
        target = lse.new_empty((requests * query_len, heads))
    torch.nan_to_num(
        lse.transpose(1, 2),
        _NAN,
        -_INF,
        -_INF,
        out=target.view(requests, query_len, heads),
    )
    return target
