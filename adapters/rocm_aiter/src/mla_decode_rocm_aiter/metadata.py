"""What a build makes of a step for AITER."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_decode import DecodeMetadata, StepFacts

if TYPE_CHECKING:
    from torch import Tensor

    from mla_decode_rocm_aiter.ops import Schedule
    from mla_decode_rocm_aiter.routes import Route


@dataclass(slots=True, kw_only=True, eq=False)
class AiterMLAMetadata(DecodeMetadata):
    """AITER's paging arrays and, where the block has one, its schedule."""

    route: Route
    """How the step is decoded."""
    kv_indptr: Tensor
    """int32 [num_reqs + 1]: first entry of each request in `kv_indices`."""
    kv_indices: Tensor
    """int32: the cache row of each token. The builder's, for its largest batch."""
    kv_last_page_lens: Tensor
    """int32 [num_reqs], all 1: AITER sees pages of one token."""
    is_empty: Tensor
    """bool [num_reqs, Q, 1]: rows without a key."""
    schedule: Schedule | None
    """None where the route runs without."""
    num_kv_splits: int
    """Splits per request without a schedule, compute units with one."""
    num_kv_splits_indptr: Tensor | None

    def facts(self) -> StepFacts:
        """The kernel of the route, and why it is not the one that the gate wants."""
        route = self.route
        path = "a persistent schedule" if route.keeps_schedule else "no schedule"
        if route.key.fold > 1:
            path += f", heads folded {route.key.fold} times"
        return StepFacts(
            kernels=route.key.kernels[:1],
            path=path,
            num_q_heads=route.heads,
            query_len=self.query_len,
            max_splits=self.num_kv_splits,
            downgrades=tuple(map(str, route.declined)),
        )

    @property
    def has_persistent_metadata(self) -> bool:
        """Whether the step has a schedule."""
        return self.schedule is not None
