"""What the Hopper kernel serves, and every reason why it does not serve a problem."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata as importlib_metadata
from typing import TYPE_CHECKING

from mla_decode.capability import (
    Capability,
    CapabilityRow,
    Feature,
    Source,
    Support,
)
from mla_decode.mask import Mask
from mla_decode.refusal import Refusal, RefusalCode

if TYPE_CHECKING:
    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem

ARCH = "sm_90"
MAX_HEADS = 128
MAX_QUERY_LEN = 32
MAX_NUM_REQS = 1024
"""Requests that the one program of the work table holds in registers."""
OLDEST_TRITON = (3, 6)
_COPY_BYTES = 16
"""What the copy engine wants strides to be multiples of."""
_LENGTHS = range(1, MAX_QUERY_LEN + 1)

CAPABILITY = Capability(
    rows=(
        CapabilityRow(
            arch=ARCH,
            dtypes=frozenset({("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8")}),
            out_dtypes=frozenset({"bf16", "fp16", "fp32"}),
            page_sizes=frozenset({16, 32, 64, 128}),
            num_q_heads=range(1, MAX_HEADS + 1),
            query_lens={Mask.CAUSAL: _LENGTHS, Mask.NON_CAUSAL: _LENGTHS},
            features={
                Feature.LSE: Support.YES,
                Feature.DCP: Support.YES,
                Feature.GRAPHS: Support.YES,
                Feature.PAGE_STRIDE: Support.YES,
            },
            source=Source.DECLARED,
            max_num_reqs=MAX_NUM_REQS,
        ),
    )
)


def hopper_refusals(problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
    """Every reason why the Hopper kernel does not serve a problem on a device.

    An assumed device asks for no Triton.
    """
    reasons = problem_refusals(problem, device)
    if device.arch == ARCH and not device.assumed:
        reasons += triton_refusals()
    return reasons


def problem_refusals(problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
    """The reasons that lie in the problem and the architecture, whatever is installed."""
    reasons = CAPABILITY.refusals(problem, device)
    if device.arch != ARCH:
        return reasons
    itemsize = 1 if problem.kv_dtype == "fp8" else 2
    if problem.page_stride * itemsize % _COPY_BYTES:
        reasons.append(
            Refusal(
                code=RefusalCode.FEATURE,
                message="the copy engine cannot step from page to page",
                got=f"{problem.page_stride * itemsize} bytes",
                allowed=f"multiples of {_COPY_BYTES} bytes",
                fix="pad the pages, or use the portable kernel",
            )
        )
    return reasons


@cache
def installed_triton() -> str | None:
    """The release of Triton, or none: from its distribution's metadata, not imported.

    Read once, since every plan on a card asks and reading takes longer than planning.
    """
    try:
        return importlib_metadata.version("triton")
    except importlib_metadata.PackageNotFoundError:
        return None


def triton_refusals(*, assumed: bool = False) -> list[Refusal]:
    """A Triton that is missing or older than the kernel; asking imports none.

    Args:
        assumed: Of a device that is described: what the machine that asks lacks
            altogether says nothing of it.
    """
    version = installed_triton()
    if assumed and version is None:
        return []
    oldest = ".".join(map(str, OLDEST_TRITON))
    if version is not None:
        found = re.match(r"(\d+)\.(\d+)", version)
        if found and tuple(map(int, found.groups())) >= OLDEST_TRITON:
            return []
    return [
        Refusal(
            code=RefusalCode.DEPENDENCY,
            message="the Hopper kernel needs Triton's Gluon",
            got="no triton" if version is None else f"triton {version}",
            allowed=f"triton {oldest} or newer",
            fix="use a torch build with a newer Triton, or the portable kernel",
        )
    ]
