"""As CUSTOM, or in place of TRITON_MLA or FLASHMLA."""

from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl

from mla_decode_vllm.impl import BridgedDecode
from mla_decode_vllm.questions import PAGE_SIZE, Questions


class CudaImpl(BridgedDecode, TritonMLAImpl):
    """TRITON_MLA's prefill and cache writes, the library's decode."""


class CudaBackend(Questions, TritonMLABackend):
    """TRITON_MLA with the library's decode."""

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """64 tokens where the user names no size: every backend here walks such pages."""
        del default_block_size
        return PAGE_SIZE

    @staticmethod
    def get_impl_cls() -> type[CudaImpl]:
        """The implementation."""
        return CudaImpl
