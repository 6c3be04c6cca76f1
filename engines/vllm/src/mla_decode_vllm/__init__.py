"""mla-decode inside vLLM: installed, and MLA layers decode through the contract."""

from mla_decode_vllm.plugin import register

__all__ = ["register"]
