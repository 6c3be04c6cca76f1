"""The reference backend: torch, any device, exact to the contract."""

from mla_decode.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend", "backend"]

backend: ReferenceBackend = ReferenceBackend()
