"""The builder class over both kernels: its objects are builders of the serving one."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

from mla_decode.batch import QueryLenSupport
from mla_decode.builder import GraphSupport, MLADecodeMetadataBuilder
from mla_decode.device import as_device_info
from mla_decode_triton.auto import choose

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mla_decode.builder import Validation
    from mla_decode.device import DeviceInfo
    from mla_decode.metadata import DecodeMetadata
    from mla_decode.problem import DecodeProblem
    from mla_decode_triton.backend import TritonMLABackend


class AutoBuilder(MLADecodeMetadataBuilder):
    """Makes a builder of the kernel that serves a problem.

    The object's class derives from this one (or from one that derives from it) and
    from the kernel's own builder, whose methods follow in the order of resolution.
    """

    query_len_support = QueryLenSupport.UNIFORM
    graph_support = GraphSupport.UNIFORM_BATCH
    supports_non_causal_multi_token_decode = True
    supports_non_causal_multi_token_dcp = True

    serving: TritonMLABackend
    """The kernel's backend."""
    passed_over: tuple[str, ...]
    """Why Hopper's own kernel does not serve; empty where it does, and elsewhere."""

    def __new__(  # noqa: PYI034 - no Self on 3.10
        cls,
        problem: DecodeProblem,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        validate: Validation = "host",
    ) -> AutoBuilder:
        """Choose the kernel; the constructor of its builder does the rest."""
        del validate
        chosen = choose(problem, as_device_info(device))
        made = object.__new__(_joined(cls, chosen.backend.builder_cls))
        made.serving = chosen.backend
        made.passed_over = chosen.passed_over
        return made

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        validate: Validation = "host",
    ) -> None:
        super().__init__(problem, device, validate=validate)

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> DecodeMetadata:
        return super()._build_decode(  # type: ignore[safe-super]  # the kernel's follows
            block_table_tensor=block_table_tensor,
            seq_lens_device=seq_lens_device,
            max_seq_len=max_seq_len,
            query_start_loc_cpu=query_start_loc_cpu,
            query_start_loc_device=query_start_loc_device,
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens_device=dcp_tot_seq_lens_device,
        )


@cache
def _joined(
    asked: type[AutoBuilder], kernels: type[MLADecodeMetadataBuilder]
) -> type[AutoBuilder]:
    """The class of the objects that a class makes over a kernel's builder."""
    names = {
        "__module__": asked.__module__,
        "__new__": lambda cls, *_, **__: object.__new__(cls),
    }
    return cast("type[AutoBuilder]", type(kernels.__name__, (asked, kernels), names))
