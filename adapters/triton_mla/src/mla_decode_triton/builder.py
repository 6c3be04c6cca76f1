"""The builder: launch shapes of a step, and the scratch that all steps share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from mla_decode.batch import QueryLenSupport
from mla_decode.builder import GraphSupport, MLADecodeMetadataBuilder
from mla_decode.errors import BackendRefused
from mla_decode.metadata import DecodeMetadata, StepFacts
from mla_decode.problem import LATENT_WIDTH
from mla_decode_triton.capability import CAPABILITY
from mla_decode_triton.launching import BoundStep, Launcher
from mla_decode_triton.planning import plan_step, workspace_rows
from mla_decode_triton.tiles import ARCH_TILES

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode.builder import Validation
    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem


@dataclass(slots=True, kw_only=True, eq=False)
class TritonMLAMetadata(DecodeMetadata):
    """One step's batch and the launches that serve it."""

    step: BoundStep

    def facts(self) -> StepFacts:
        """The launches of one forward."""
        builder = cast("TritonMLAMetadataBuilder", self.builder)
        step = self.step
        launches = 1 if step.merge is None else 2
        return StepFacts(
            kernels=("decode_kernel", "merge_kernel")[:launches],
            path="portable kernel" if builder.passed_over else "",
            downgrades=builder.passed_over,
            num_q_heads=builder.problem.num_q_heads,
            query_len=self.query_len,
            max_splits=step.num_splits,
        )


class TritonMLAMetadataBuilder(MLADecodeMetadataBuilder):
    """Uniform blocks under either mask. A build computes sizes and touches no device.

    Kernels are compiled here and not while serving, for every mask and block length
    that the problem names.

    Raises:
        BackendRefused: The capability's reasons, for who builds a builder by hand.
    """

    query_len_support = QueryLenSupport.UNIFORM
    graph_support = GraphSupport.UNIFORM_BATCH
    supports_non_causal_multi_token_decode = True
    supports_non_causal_multi_token_dcp = True
    passed_over: tuple[str, ...] = ()
    """Why a kernel of the card's own does not serve, where one was asked first."""

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceInfo | torch.device | str | None = None,
        *,
        validate: Validation = "host",
    ) -> None:
        super().__init__(problem, device, validate=validate)
        reasons = CAPABILITY.refusals(problem, self.device_info)
        if reasons:
            raise BackendRefused(
                "triton_mla cannot serve this problem.", {"triton_mla": reasons}
            )
        self.tiles = ARCH_TILES[self.device_info.arch]
        rows = workspace_rows(problem, self.tiles)
        self.partial_out = self._float32(rows, LATENT_WIDTH)
        self.partial_lse = self._float32(rows)
        self._steps: dict[tuple[int, int, int, bool], BoundStep] = {}
        self.launcher = Launcher(
            problem,
            self.device_info,
            self.tiles,
            partial_out=self.partial_out,
            partial_lse=self.partial_lse,
        )

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> TritonMLAMetadata:
        del query_start_loc_cpu  # blocks are uniform: num_reqs and Q say it all
        num_reqs = seq_lens_device.shape[0]
        return TritonMLAMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_seq_len=max_seq_len,
            num_reqs=num_reqs,
            num_decode_tokens=num_decode_tokens,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            step=self._step(num_reqs, max_seq_len),
        )

    def _step(self, num_reqs: int, max_seq_len: int) -> BoundStep:
        """Steps by shape; lengths count in powers of two, so that few are made."""
        ceiling = 1 << max(max_seq_len - 1, 1).bit_length()
        length = min(ceiling, self.problem.max_model_len)
        key = (num_reqs, self._decode_query_len, length, self._decode_causal)
        found = self._steps.get(key)
        if found is None:
            plan = plan_step(
                self.problem,
                self.tiles,
                num_reqs=num_reqs,
                query_len=self._decode_query_len,
                max_seq_len=length,
            )
            found = self.launcher.bind(plan, causal=self._decode_causal)
            self._steps[key] = found
        return found

    def _float32(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)
