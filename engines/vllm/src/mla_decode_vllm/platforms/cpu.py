"""In place of CPU_MLA."""

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from mla_decode_vllm.impl import BridgedDecode
from mla_decode_vllm.questions import Questions


class CpuImpl(BridgedDecode, CPUMLAImpl):
    """CPU_MLA's prefill, the library's decode."""

    supports_dcp = False


class CpuBackend(Questions, CPUMLABackend):
    """CPU_MLA with the library's decode; named like the member it stands in for."""

    @staticmethod
    def get_impl_cls() -> type[CpuImpl]:
        """The implementation."""
        return CpuImpl
