"""Whether vLLM may capture the library's decode in its graphs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mla_decode import detect_device, survey
from mla_decode_vllm.problem import Group
from mla_decode_vllm.settings import read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

logger = logging.getLogger("vllm.mla_decode")


def can_capture(
    vllm_config: VllmConfig, spec: AttentionSpec, *, quantised: bool
) -> bool:
    """Whether somebody serves the group's uniform batches inside a graph.

    vLLM asks this of the class, before there is a builder: the heads are the model's
    and DCP is left out. The builder asks again with what it knows.
    """
    device = detect_device()
    if device.vendor == "cpu":
        return False
    settings = read_settings()
    speculative = vllm_config.speculative_config
    drafted = 0 if speculative is None else speculative.num_speculative_tokens or 0
    group = Group(
        vllm_config=vllm_config,
        spec=spec,
        has_drafts=getattr(spec, "non_causal_multi_token_decode", False),
        is_draft_only=False,
        num_q_heads=vllm_config.model_config.get_num_attention_heads(
            vllm_config.parallel_config
        ),
        threshold=1 + drafted,
        dcp=None,
        has_graphs=True,
        quantises_query=quantised,
    )
    for mask, problem in group.problems().items():
        found = survey(problem, device, settings.backend, settings.lowering)
        if found.selection is None:
            logger.info(
                "mla-decode: %s steps run outside graphs: %s",
                mask,
                {
                    name: [f"{reason.code}: {reason.message}" for reason in reasons]
                    for name, reasons in found.refused.items()
                },
            )
            return False
    return True
