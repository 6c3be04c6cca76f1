"""The entry point that vLLM calls in every process, and more than once."""

from __future__ import annotations

import logging

from mla_decode import ContractError
from mla_decode_vllm.releases import SUPPORTED, installed_vllm, is_supported
from mla_decode_vllm.settings import read_settings

logger = logging.getLogger("vllm.mla_decode")
"""Below vLLM's own logger, so that its lines appear among vLLM's."""

STANDS_IN = {
    "ROCM_AITER_MLA": "mla_decode_vllm.platforms.rocm.RocmBackend",
    "CPU_MLA": "mla_decode_vllm.platforms.cpu.CpuBackend",
    "TRITON_MLA": "mla_decode_vllm.platforms.cuda.CudaBackend",
    "FLASHMLA": "mla_decode_vllm.platforms.cuda.CudaBackend",
    "CUSTOM": "mla_decode_vllm.platforms.cuda.CudaBackend",
}
"""The class that stands in for each member of vLLM's enum."""


def register() -> None:
    """Put the library in place of this platform's MLA backend.

    Idempotent. Outside the supported releases, or with settings that say nothing
    known, one warning tells so and vLLM keeps its own backends.
    """
    try:
        settings = read_settings()
    except ContractError as error:
        logger.warning("mla-decode stays off: %s", error)
        return
    if settings.is_off:
        return
    release = installed_vllm()
    if not is_supported(release):
        logger.warning(
            "mla-decode stays off: vLLM %s is outside %s; upgrade mla-decode-vllm, or "
            "set MLA_DECODE_VLLM=off to silence this line.",
            release or "(none found)",
            SUPPORTED,
        )
        return
    from vllm.platforms import current_platform  # noqa: PLC0415 - vLLM may be absent
    from vllm.v1.attention.backends.registry import (  # noqa: PLC0415 - as above
        AttentionBackendEnum,
        register_backend,
    )

    member = settings.over or platform_member(current_platform)
    if member is not None:
        register_backend(AttentionBackendEnum[member], STANDS_IN[member])


def platform_member(platform: object) -> str | None:
    """The enum member whose place the library takes on a vLLM platform.

    On CUDA it is CUSTOM, which vLLM takes only where it is asked for by name; set
    ``MLA_DECODE_VLLM_OVER`` to stand in for TRITON_MLA or FLASHMLA instead.
    """
    for question, member in (
        ("is_rocm", "ROCM_AITER_MLA"),
        ("is_cuda", "CUSTOM"),
        ("is_cpu", "CPU_MLA"),
    ):
        if getattr(platform, question)():
            return member
    return None
