"""A numeric check at first use: tiny random problems against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode.errors import BackendRefused
from mla_decode.mask import Mask
from mla_decode.metadata import CommonAttentionMetadata
from mla_decode.problem import ROW_WIDTH
from mla_decode.reference.oracle import decode_oracle
from mla_decode.refusal import Refusal, RefusalCode

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.backend import Backend
    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.device import DeviceInfo

SEQ_LEN = 10
"""Keys of the check: so few that one masked or missing key moves every value."""
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 8e-2}
"""Largest relative error by the coarsest of query and cache dtype. A wrong mask over
ten keys is past 0.3."""
_COARSEST_FIRST = ("fp8", "bf16", "fp16", "fp32")
_SCALE = 192**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What the check measured for one block of the problem."""

    query_len: int
    mask: Mask
    relative_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance (NaN never is)."""
        return self.relative_error <= self.tolerance


def self_check(
    backend: Backend, builder: MLADecodeMetadataBuilder, *, seed: int = 0
) -> tuple[SelfCheck, ...]:
    """Decode every block of the builder's problem on random data; synchronises.

    One request, `SEQ_LEN` keys (or the block's length, if that is longer).

    Raises:
        BackendRefused: A block's values are wrong; code ``checker_error``, with the
            measured error as evidence.
    """
    checks = tuple(
        _check_block(backend, builder, query_len, mask, seed)
        for query_len, mask in builder.problem.blocks()
    )
    failed = [check for check in checks if not check.passed]
    if failed:
        reasons = [
            Refusal(
                code=RefusalCode.CHECKER_ERROR,
                message=(
                    f"Wrong values for a {check.mask} block of {check.query_len} "
                    f"token(s) over {max(SEQ_LEN, check.query_len)} keys"
                ),
                got=f"relative error {check.relative_error:.3g}",
                allowed=f"{check.tolerance:.3g}",
                fix="pin another backend, and report this with `mla-decode explain "
                "--json` of the problem",
            )
            for check in failed
        ]
        raise BackendRefused(
            f"{_named(backend, builder.device_info)} failed its numeric self-check on "
            f"{builder.device_info.arch}.",
            {backend.name: reasons},
        )
    return checks


def _named(backend: Backend, device: DeviceInfo) -> str:
    """The backend with its library's version, where it can tell: not its build."""
    asked = getattr(backend, "inner", backend)  # of a rewrite
    versions: Any = getattr(asked, "library_versions", None)
    found = {} if versions is None else versions(device)
    told = ", ".join(f"{library} {version}" for library, version in found.items())
    return f"{backend.name} ({told})" if told else backend.name


def _check_block(
    backend: Backend,
    builder: MLADecodeMetadataBuilder,
    query_len: int,
    mask: Mask,
    seed: int,
) -> SelfCheck:
    problem, info = builder.problem, builder.device_info
    seq_len = min(max(SEQ_LEN, query_len), problem.max_model_len)
    pages = -(-seq_len // problem.page_size)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(query_len, problem.num_q_heads, ROW_WIDTH, generator=generator)
    rows = torch.randn(pages, problem.page_size, ROW_WIDTH, generator=generator)
    q = q.to(torch_dtype(problem.q_dtype, info))
    rows = rows.to(torch_dtype(problem.kv_dtype, info)).to(builder.device)
    cache = _strided(rows, problem.page_stride)
    common = _batch(builder, query_len, seq_len, pages, causal=mask is Mask.CAUSAL)
    one = torch.ones(1, device=builder.device)
    output = backend.forward(
        q.to(builder.device),
        cache,
        builder.build(common),
        softmax_scale=_SCALE,
        q_scale=one if problem.q_dtype == "fp8" else None,
        kv_scale=one if problem.kv_dtype == "fp8" else None,
    )
    truth, _ = decode_oracle(
        q,
        cache,
        common.block_table_tensor.cpu(),
        common.seq_lens.cpu(),
        common.query_start_loc_cpu,
        causal=mask is Mask.CAUSAL,
        softmax_scale=_SCALE,
    )
    error = (output.out.cpu().double() - truth).norm() / truth.norm()
    dtypes = {problem.q_dtype, problem.kv_dtype}
    coarsest = next(dtype for dtype in _COARSEST_FIRST if dtype in dtypes)
    return SelfCheck(
        query_len=query_len,
        mask=mask,
        relative_error=float(error),
        tolerance=TOLERANCE[coarsest],
    )


def _strided(pages: Tensor, stride: int) -> Tensor:
    """The same pages at the distance that the problem declares."""
    number, size, width = pages.shape
    if stride == size * width:
        return pages
    room = pages.new_zeros(number, stride)
    room[:, : size * width] = pages.reshape(number, -1)
    return room.as_strided(pages.shape, (stride, width, 1))


def _batch(
    builder: MLADecodeMetadataBuilder,
    query_len: int,
    seq_len: int,
    pages: int,
    *,
    causal: bool,
) -> CommonAttentionMetadata:
    device = builder.device
    starts = torch.tensor([0, query_len], dtype=torch.int32)
    lens = torch.tensor([seq_len], dtype=torch.int32, device=device)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=1,
        num_actual_tokens=query_len,
        max_query_len=query_len,
        max_seq_len=seq_len,
        block_table_tensor=torch.arange(
            pages, dtype=torch.int32, device=device
        ).unsqueeze(0),
        causal=causal,
        dcp_local_seq_lens=lens if builder.problem.dcp is not None else None,
    )
