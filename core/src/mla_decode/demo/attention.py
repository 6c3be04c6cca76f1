"""The one place where the demo attends: a layer group's cache, and its decoder.

Every attention call of the demo goes through `MLADecoder.run`, and the counts that the
demo shows are the decoder's own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_decode.decoder import MLADecoder
from mla_decode.dtypes import torch_dtype
from mla_decode.paging import PagedLatentCache
from mla_decode.problem import DecodeProblem
from mla_decode.selection import survey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mla_decode.device import DeviceInfo
    from mla_decode.mask import Mask
    from mla_decode.metadata import DecodeMetadata
    from mla_decode.selection import Lowering
    from mla_decode.step_report import StepReport

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How attention is served, the same for every layer group of a run."""

    device: DeviceInfo
    backend: str = "auto"
    lowering: Lowering = "refuse"
    dtype: str = "fp32"
    """Of queries, caches and results, in the contract's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What a layer group asks for, apart from how it is served."""

    num_layers: int
    num_heads: int
    query_lens: frozenset[int]
    mask: Mask
    num_reqs: int
    max_model_len: int
    softmax_scale: float

    def problem(self, dtype: str) -> DecodeProblem:
        """State the group's decode problem for one dtype."""
        return DecodeProblem(
            num_q_heads=self.num_heads,
            q_dtype=dtype,
            kv_dtype=dtype,
            out_dtype=dtype,
            page_size=PAGE_SIZE,
            query_lens=self.query_lens,
            masks=frozenset({self.mask}),
            max_num_reqs=self.num_reqs,
            max_model_len=self.max_model_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """One kind of attention call: who served it, under which mask, how often."""

    kind: str
    """``prompt``, ``decode``, ``verify`` or ``draft``."""
    mask: str
    query_len: int
    backend: str
    evidence: str
    lowering: str
    """``native``, or the exact rewrite that was planned."""
    count: int
    """Calls of `MLADecoder.run`: one a layer and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a layer group: the plan that its layers share, and their slots."""

    plan: DecodeMetadata
    slots: Tensor
    positions: Tensor
    """int64 [requests, Q]."""


class LatentAttention:
    """A layer group's paged cache and the decoder that reads it.

    Args:
        group: What the layers ask.
        serving: Who serves them.

    Raises:
        BackendRefused: Nobody serves the group's problem.
    """

    def __init__(self, group: GroupShape, serving: Serving) -> None:
        self.group = group
        self.decoder: MLADecoder = MLADecoder(
            group.problem(serving.dtype),
            serving.backend,
            serving.lowering,
            device=serving.device,
        )
        self.cache: PagedLatentCache = PagedLatentCache(
            group.num_reqs * -(-group.max_model_len // PAGE_SIZE),
            PAGE_SIZE,
            num_layers=group.num_layers,
            dtype=torch_dtype(serving.dtype, serving.device),
            device=serving.device.torch_device,
        )
        for request in range(group.num_reqs):
            self.cache.allocate(request)
        self._kind = ""
        self._kinds: dict[str, tuple[StepReport, int]] = {}
        self._counted: Counter[str] = Counter()

    def begin(self, requests: Sequence[int], query_len: int, kind: str) -> Step:
        """Make room for a block of each request and plan the step.

        Args:
            requests: Those of the step, in the order of the query rows.
            query_len: Q, tokens of each block.
            kind: What the step is for, as `CallKind` names it.
        """
        self._settle()
        self._kind = kind
        starts = torch.tensor([self.cache.seq_len(request) for request in requests])
        slots = [self.cache.extend(request, query_len) for request in requests]
        common = self.cache.batch(
            requests,
            [query_len] * len(requests),
            causal=self.group.mask.value == "causal",
        )
        positions = starts[:, None] + torch.arange(query_len)
        return Step(
            plan=self.decoder.plan(common),
            slots=torch.cat(slots),
            positions=positions.to(self.cache.layers[0].device),
        )

    def attend(self, layer: int, step: Step, rows: Tensor, queries: Tensor) -> Tensor:
        """Write a block's rows, then attend.

        Args:
            layer: Which layer of the group.
            step: From `begin`.
            rows: (requests, Q, 576) of the block's own tokens.
            queries: (requests, Q, H, 576), absorbed.

        Returns:
            (requests, Q, H, 512) in the dtype of `queries`.
        """
        self.cache.write(layer, step.slots, rows.flatten(0, 1))
        cache = self.cache.layers[layer]
        output = self.decoder.run(
            queries.flatten(0, 1).to(cache.dtype),
            cache,
            step.plan,
            softmax_scale=self.group.softmax_scale,
        )
        return output.out.to(queries.dtype).view(*queries.shape[:3], -1)

    def fill(
        self, requests: Sequence[int], counts: Sequence[int], rows: Tensor
    ) -> None:
        """Append rows that no query of this group belongs to.

        Args:
            requests: Whose rows they are.
            counts: Tokens of each request.
            rows: (layers, sum of counts, 576), requests in order.
        """
        slots = torch.cat(
            [
                self.cache.extend(request, count)
                for request, count in zip(requests, counts, strict=True)
            ]
        )
        for layer, of_layer in enumerate(rows):
            self.cache.write(layer, slots, of_layer)

    def calls(self) -> tuple[CallKind, ...]:
        """Tell which kinds of calls the decoder has counted so far."""
        self._settle()
        return tuple(
            CallKind(
                kind=kind,
                mask=report.mask,
                query_len=report.query_len,
                backend=report.backend,
                evidence=report.evidence,
                lowering=str(report.lowering["kind"]),
                count=count,
            )
            for kind, (report, count) in self._kinds.items()
        )

    def _settle(self) -> None:
        """Book what the decoder counted since the last look under the step's kind."""
        report = self.decoder.report()
        if report is None:
            return
        now = Counter(self.decoder.calls)
        new = now.total() - self._counted.total()
        _, before = self._kinds.get(self._kind, (report, 0))
        self._kinds[self._kind] = (report, before + new)
        self._counted = now


def widest_dtype(groups: Sequence[GroupShape], serving: Serving) -> str:
    """Choose fp32 where the backend serves it, and bf16, what engines use, elsewhere.

    In fp32 a block of one token and a block of many give the same greedy text. In bf16
    a near tie between two bytes can fall either way.
    """
    served = all(
        survey(
            group.problem("fp32"), serving.device, serving.backend, serving.lowering
        ).selection
        for group in groups
    )
    return "fp32" if served else "bf16"
