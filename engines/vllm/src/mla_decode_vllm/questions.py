"""What vLLM asks a backend class at selection, answered from our capability."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none

from mla_decode import (
    ContractError,
    DecodeProblem,
    Mask,
    OutdatedLibraryError,
    Refusal,
    detect_device,
    discover,
    survey,
)
from mla_decode.selection import AUTO_ORDER
from mla_decode_vllm.builder import BridgedMetadataBuilder
from mla_decode_vllm.problem import cache_word, draft_blocks
from mla_decode_vllm.settings import read_settings

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PAGE_SIZE = 64
"""Tokens a page, where nobody has named a size yet."""


class Questions:
    """Mixin over a stock backend class: our builder, and our answers with reasons."""

    builder: ClassVar[type[BridgedMetadataBuilder]] = BridgedMetadataBuilder

    @classmethod
    def get_builder_cls(cls) -> type[BridgedMetadataBuilder]:
        """The bridging builder."""
        return cls.builder

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether somebody here decodes non-causal blocks, by a kernel or a rewrite.

        Raises:
            OutdatedLibraryError: A newer release of the platform's library would, and
                rewrites are not allowed: vLLM is not to slide to a slower backend.
        """
        settings = read_settings()
        if settings.lowering == "exact":
            return True
        device = detect_device()
        known = discover()
        order = AUTO_ORDER.get(device.arch) or AUTO_ORDER[device.vendor]
        names = order if settings.backend is None else (settings.backend,)
        for name in names:
            backend = known[name].backend if name in known else None
            if backend is not None and backend.supports_non_causal(device):
                return True
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """The stock class's reasons, then the library's, each with its way out."""
        reasons: list[str] = super().validate_configuration(*args, **kwargs)  # type: ignore[misc]  # a mixin's super
        if reasons:
            return reasons
        settings = read_settings()
        try:
            problem = selection_problem(kwargs, quantised=cls.builder.quantises_query)
            if problem is None:
                return reasons
            found = survey(
                problem, detect_device(), settings.backend, settings.lowering
            )
        except ContractError as error:
            return [str(error)]
        if isinstance(found.outdated, OutdatedLibraryError):
            raise found.outdated
        if found.selection is not None:
            return reasons
        return [
            f"mla-decode {name}: {_sentence(reason)}"
            for name, group in found.refused.items()
            for reason in group
        ]


def selection_problem(
    asked: dict[str, Any], *, quantised: bool
) -> DecodeProblem | None:
    """What is known of the problem when vLLM selects; None outside an engine.

    The builder asks again with all of it: the group's heads, dtypes and block lengths.
    """
    config = get_current_vllm_config_or_none()
    dtype = _DTYPES.get(asked.get("dtype"))  # type: ignore[arg-type]  # None finds none
    if config is None or config.model_config is None or dtype is None:
        return None
    is_draft = bool(asked.get("use_non_causal"))
    kv_dtype = cache_word(asked.get("kv_cache_dtype"), dtype)
    return DecodeProblem(
        num_q_heads=config.model_config.get_num_attention_heads(config.parallel_config),
        q_dtype="fp8" if quantised and kv_dtype == "fp8" else dtype,
        kv_dtype=kv_dtype,
        out_dtype=dtype,
        page_size=asked.get("block_size") or PAGE_SIZE,
        query_lens=draft_blocks(config) if is_draft else frozenset({1}),
        masks=frozenset({Mask.NON_CAUSAL if is_draft else Mask.CAUSAL}),
        max_num_reqs=config.scheduler_config.max_num_seqs,
        max_model_len=config.model_config.max_model_len,
    )


def _sentence(reason: Refusal) -> str:
    return (
        f"{reason.message} (got {reason.got}; allowed {reason.allowed}; "
        f"fix: {reason.fix})"
    )
