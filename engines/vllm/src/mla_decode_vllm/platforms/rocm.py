"""In place of ROCM_AITER_MLA. Never run on AMD."""

from typing import ClassVar

from vllm.v1.attention.backends.mla.rocm_aiter_mla import (
    AiterMLABackend,
    AiterMLAImpl,
)

from mla_decode_vllm.builder import BridgedMetadataBuilder
from mla_decode_vllm.impl import BridgedDecode
from mla_decode_vllm.questions import Questions


class RocmBuilder(BridgedMetadataBuilder):
    """AITER's implementation quantises the query of an fp8 cache."""

    quantises_query: ClassVar[bool] = True


class RocmImpl(BridgedDecode, AiterMLAImpl):
    """AITER's prefill, the library's decode."""


class RocmBackend(Questions, AiterMLABackend):
    """ROCM_AITER_MLA with the library's decode."""

    builder = RocmBuilder

    @staticmethod
    def get_impl_cls() -> type[RocmImpl]:
        """The implementation."""
        return RocmImpl
