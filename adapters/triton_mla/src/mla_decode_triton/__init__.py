"""Triton MLA decode behind the mla-decode contract: portable, and for Hopper."""

from mla_decode_triton.backend import TritonMLABackend
from mla_decode_triton.kernel_choice import chosen_backend

__all__ = ["TritonMLABackend", "backend", "chosen_backend"]

backend = chosen_backend()
"""What the entry point names; importing it loads no Triton and starts no GPU."""
