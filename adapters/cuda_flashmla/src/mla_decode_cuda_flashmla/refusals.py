"""Why the backend cannot serve a problem on a device: every reason, and no kernel run."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from mla_decode.refusal import Refusal, RefusalCode
from mla_decode_cuda_flashmla.inspection import INSTALL, LibraryRefused
from mla_decode_cuda_flashmla.library import library_for
from mla_decode_cuda_flashmla.limits import (
    ARCH,
    CAPABILITY,
    FIXED_SCHEDULER_MAX_REQS,
    H200_SMS,
    SCHEDULER_MAX_REQS,
    limit_refusals,
)

if TYPE_CHECKING:
    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem
    from mla_decode_cuda_flashmla.inspection import Library


def refusals(problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
    """Every reason; a missing library hides none of the others.

    Under an assumed architecture the library is the simulator, and is never missing.
    """
    found = list(CAPABILITY.refusals(problem, device))
    if device.arch != ARCH:
        return found
    if not device.assumed and not _gpu_is_present():
        found.append(
            Refusal(
                code=RefusalCode.DEVICE_ABSENT,
                message="torch sees no GPU",
                got="torch.cuda.is_available() is False",
                allowed="an NVIDIA Hopper GPU and a CUDA build of torch",
                fix='use DeviceInfo.assume("sm_90") to plan without the GPU',
            )
        )
    num_sms = count_sms(device)
    library: Library | None = None
    try:
        library = library_for(device)
    except LibraryRefused as refused:
        found.append(refused.refusal)
    most = SCHEDULER_MAX_REQS
    if problem.q_dtype == "fp8":
        most = FIXED_SCHEDULER_MAX_REQS
    if library is not None:
        kernel = library.decode_for(problem.q_dtype)
        if kernel is None and problem.kv_dtype == "fp8":
            found.append(_no_fp8(library))
        elif kernel is not None:
            most = kernel.max_num_reqs
    found += limit_refusals(problem, num_sms=num_sms, max_num_reqs=most)
    return found


def _no_fp8(library: Library) -> Refusal:
    return Refusal(
        code=RefusalCode.KV_DTYPE,
        message="The installed FlashMLA has no dense fp8 kernel",
        got=f"fp8 with {library.distribution} {library.version} ({library.module})",
        allowed="bf16, fp16; fp8 with sgl-flash-mla 1.0.0 or vLLM's fp8 extension",
        fix=f"choose another cache dtype, or {INSTALL}",
    )


def _gpu_is_present() -> bool:
    import torch  # noqa: PLC0415 - the backend object imports without torch

    return torch.cuda.is_available()


def count_sms(device: DeviceInfo) -> int:
    """Multiprocessors of a device; an H200's where there is none to ask."""
    if device.assumed or not _gpu_is_present():
        return H200_SMS
    return _count_sms(device.index)


@cache
def _count_sms(index: int) -> int:
    import torch  # noqa: PLC0415 - as above

    return int(torch.cuda.get_device_properties(index).multi_processor_count)
