"""The decode problems of one vLLM attention group, from the group's own layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mla_decode import ArgumentError, Dcp, DecodeProblem, Mask

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

_WORDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.uint8: "fp8",
}
_CACHE_WORDS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What vLLM knows of one attention group when it makes the group's builder."""

    vllm_config: VllmConfig
    spec: AttentionSpec
    has_drafts: bool
    """Whether some layer's blocks are non-causal."""
    is_draft_only: bool
    """Whether every layer's are: a causal step is then the exception."""
    num_q_heads: int
    """Heads that one rank's decode sees: the whole group's under DCP."""
    threshold: int
    """The longest block that vLLM decodes rather than prefills."""
    dcp: Dcp | None
    has_graphs: bool
    quantises_query: bool

    def problems(self) -> dict[Mask, DecodeProblem]:
        """One problem a mask.

        dtype and head count are the group's: a draft's cache may differ from the
        run's. Causal steps have blocks of 1 to `threshold` tokens, since vLLM decodes
        short extends too. A group of drafts alone has them as well: vLLM's first
        runner builds every group for the target's batch, and a drafter may be causal.
        """
        blocks = {Mask.CAUSAL: frozenset(range(1, self.threshold + 1))}
        if self.has_drafts:
            blocks[Mask.NON_CAUSAL] = draft_blocks(self.vllm_config)
        return {mask: self._problem(mask, lens) for mask, lens in blocks.items()}

    def _problem(self, mask: Mask, query_lens: frozenset[int]) -> DecodeProblem:
        config = self.vllm_config
        kv_dtype = cache_word(
            getattr(self.spec, "cache_dtype_str", None), _WORDS[self.spec.dtype]
        )
        model_dtype = _WORDS[config.model_config.dtype]
        is_quantised = kv_dtype == "fp8" and self.quantises_query
        return DecodeProblem(
            num_q_heads=self.num_q_heads,
            q_dtype="fp8" if is_quantised else model_dtype,
            kv_dtype=kv_dtype,
            out_dtype=model_dtype,
            page_size=self.spec.block_size,
            query_lens=query_lens,
            masks=frozenset({mask}),
            dcp=self.dcp,
            graphs=self.has_graphs,
            kv_page_stride=page_stride(self.spec),
            max_num_reqs=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len
            + max(query_lens),  # a draft block may end past the model's length
        )


def is_draft(layer: Any) -> bool:
    """Whether vLLM's layer declares non-causal blocks."""
    return bool(getattr(layer, "non_causal_multi_token_decode", False))


def draft_blocks(vllm_config: VllmConfig) -> frozenset[int]:
    """The block lengths of the run's drafter.

    DFlash asks with the anchor and K masks; DSpark with K tokens, or K + 1 where its
    checkpoint does not sample from the anchor.
    """
    speculative = vllm_config.speculative_config
    drafted = 0 if speculative is None else speculative.num_speculative_tokens or 0
    with_anchor = frozenset({drafted + 1})
    if speculative is not None and speculative.method == "dspark" and drafted:
        return with_anchor | {drafted}
    return with_anchor


def page_stride(spec: AttentionSpec) -> int | None:
    """Elements from page to page where vLLM pads its pages, else None."""
    padded = getattr(spec, "page_size_padded", None)
    return None if padded is None else int(padded) // spec.dtype.itemsize


def cache_word(name: str | None, default: str) -> str:
    """The contract's word for vLLM's name of a cache dtype.

    Raises:
        ArgumentError: The cache is in a form that the contract does not have.
    """
    if name in {None, "auto"}:
        return default
    word = _CACHE_WORDS.get(str(name))
    if word is None:
        raise ArgumentError(
            "The KV cache is in a form that the contract does not have.",
            got=str(name),
            allowed=", ".join(["auto", *_CACHE_WORDS]),
            fix="set --kv-cache-dtype to one of these, or MLA_DECODE_VLLM=off",
        )
    return word
