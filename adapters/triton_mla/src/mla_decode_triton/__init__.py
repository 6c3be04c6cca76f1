"""Portable Triton MLA decode behind the mla-decode contract, for NVIDIA and AMD."""

from mla_decode_triton.backend import TritonMLABackend

__all__ = ["TritonMLABackend", "backend"]

backend = TritonMLABackend()
"""What the entry point names; importing it loads no Triton and starts no GPU."""
