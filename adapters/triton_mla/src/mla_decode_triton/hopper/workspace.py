"""The buffers of one builder, which its steps share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode_triton.hopper.grid import WorkspaceSize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workspace:
    """The buffers that steps write beside their outputs; their addresses never change."""

    schedule: Tensor
    """int32, the work table: see `schedule.plan_kernel`."""
    scratch: Tensor
    """int32."""
    partial_out: Tensor
    """float32 [rows, 512]."""
    partial_lse: Tensor
    """float32 [rows]."""

    @classmethod
    def allocate(cls, size: WorkspaceSize, device: torch.device) -> Workspace:
        """Allocate all of it."""

        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = size.partial_rows
        return cls(
            schedule=make(size.schedule_entries, dtype=torch.int32),
            scratch=make(size.scratch_entries, dtype=torch.int32),
            partial_out=make(rows, LATENT_WIDTH, dtype=torch.float32),
            partial_lse=make(rows, dtype=torch.float32),
        )
