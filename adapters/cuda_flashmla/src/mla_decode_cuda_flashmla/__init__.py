"""FlashMLA dense decode behind the contract: causal only, NVIDIA Hopper only."""

from mla_decode_cuda_flashmla.backend import FlashMLABackend

__all__ = ["FlashMLABackend", "backend"]

backend = FlashMLABackend()
"""The object behind the entry point ``cuda_flashmla``."""
