"""What is fuzzed: each backend that a CPU can run, and the problems drawn for it."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, fields
from typing import ClassVar

from mla_decode import DecodeProblem, DeviceInfo, Mask
from mla_decode.discovery import Candidate, discover
from mla_decode.problem import ROW_WIDTH

MAX_REQS = 3
QUERY_LENS = ({1}, {1, 2}, {4}, {1, 3}, {1, 2, 4})
MASKS = ({Mask.CAUSAL}, {Mask.NON_CAUSAL}, set(Mask))


@functools.cache
def _installed():
    return discover()


@dataclass(frozen=True, kw_only=True)
class Target:
    """One backend on one device, with what its problems are drawn from."""

    name: str
    backend: str
    device: DeviceInfo
    heads: tuple[int, ...] = (2, 1, 5)
    page_sizes: tuple[int, ...] = (16, 1, 64)
    dtypes: tuple[tuple[str, str], ...] = (("bf16", "bf16"),)
    arch: str = ""
    """Of the simulated AITER that this process must hold."""
    candidate: Candidate | None = None
    """Stands for the installed backend: how a planted defect gets in."""

    @property
    def candidates(self) -> dict[str, Candidate]:
        """What a decoder chooses from."""
        return {self.backend: self.candidate or _installed()[self.backend]}

    @contextlib.contextmanager
    def prepared(self, machine=None):
        """This process, ready to decode on the device: faults raise, none ends it."""
        with contextlib.ExitStack() as stack:
            if self.arch:
                from mla_decode_rocm_aiter.simulator import simulated

                stack.enter_context(simulated(self.arch, cus=16))
            elif self.backend == "cuda_flashmla":
                from mla_decode_cuda_flashmla.simulator.faults import raising_exits

                stack.enter_context(raising_exits())
            yield machine

    def problem(self, shape):
        """The problem of a drawn shape."""
        heads = self.heads[shape.heads % len(self.heads)]
        page_size = self.page_sizes[shape.page_size % len(self.page_sizes)]
        q_dtype, kv_dtype = self.dtypes[shape.dtypes % len(self.dtypes)]
        out_dtype = "bf16" if q_dtype == "fp8" else q_dtype
        return DecodeProblem(
            num_q_heads=heads,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            out_dtype=out_dtype,
            page_size=page_size,
            query_lens=frozenset(QUERY_LENS[shape.query_lens]),
            masks=frozenset(MASKS[shape.masks]),
            needs_lse=bool(shape.needs_lse),
            graphs=bool(shape.graphs),
            kv_page_stride=(page_size + 1) * ROW_WIDTH if shape.has_gaps else None,
            max_num_reqs=MAX_REQS,
            max_model_len={1: 20, 16: 40, 64: 90}[page_size],
        )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What hypothesis draws of a problem: one number, read digit by digit."""

    COUNT: ClassVar[int] = 5 * 3 * 6 * 5 * 3 * 2 * 2 * 2 * 2 * 2

    query_lens: int = 0
    masks: int = 0
    heads: int = 0
    dtypes: int = 0
    page_size: int = 0
    needs_lse: int = 0
    graphs: int = 0
    has_gaps: int = 0
    is_strict: int = 0
    """Whether no rewrite is allowed."""
    is_host_only: int = 0
    """Whether tables and lengths are taken on trust."""

    @classmethod
    def of(cls, number):
        """Every number below `COUNT` is a problem of its own; 0 is the plainest."""
        digits = []
        for base in (5, 3, 6, 5, 3, 2, 2, 2, 2, 2):
            number, digit = divmod(number, base)
            digits.append(digit)
        names = (field.name for field in fields(cls))
        return cls(**dict(zip(names, digits, strict=True)))

    @property
    def lowering(self):
        """In the words of `MLADecoder`."""
        return "refuse" if self.is_strict else "exact"

    @property
    def validate(self):
        """In the words of `MLADecoder`."""
        return "host" if self.is_host_only else "device"


PLAIN = Shape()
"""Every target serves the problem of this shape natively."""


def _aiter(arch):
    return Target(
        name=f"rocm_aiter-{arch}",
        backend="rocm_aiter",
        device=DeviceInfo.assume(arch),
        heads=(16, 8),
        page_sizes=(16, 1),
        dtypes=(("bf16", "bf16"), ("fp8", "fp8")),
        arch=arch,
    )


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="reference",
            backend="reference",
            device=DeviceInfo.assume("cpu"),
            dtypes=(
                ("bf16", "bf16"),
                ("fp16", "fp16"),
                ("fp32", "fp32"),
                ("bf16", "fp8"),
                ("fp8", "fp8"),
            ),
        ),
        _aiter("gfx942"),
        _aiter("gfx950"),
        Target(
            name="cuda_flashmla-sm_90",
            backend="cuda_flashmla",
            device=DeviceInfo.assume("sm_90"),
            page_sizes=(64,),
            dtypes=(("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8")),
        ),
        Target(
            name="triton_mla-sm_90",
            backend="triton_mla",
            device=DeviceInfo.assume("sm_90"),
            heads=(2, 1, 5),
            dtypes=(("bf16", "bf16"), ("bf16", "fp8")),
        ),
    )
}
