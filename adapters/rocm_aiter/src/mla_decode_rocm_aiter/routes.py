"""Which way a block takes: by its mask first, then by what has a kernel."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from mla_decode import Mask, Refusal, RefusalCode
from mla_decode_rocm_aiter.heads import AiterMLAHelper
from mla_decode_rocm_aiter.keys import KernelKey
from mla_decode_rocm_aiter.limits import kernel_limits
from mla_decode_rocm_aiter.walks import kv_walks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mla_decode import DecodeProblem
    from mla_decode_rocm_aiter.facts import Facts
    from mla_decode_rocm_aiter.limits import LeavingVariables


class Block(NamedTuple):
    """One block of a problem: everything of it that a route depends on."""

    num_q_heads: int
    q_dtype: str
    kv_dtype: str
    needs_lse: bool
    q: int
    """Query tokens."""
    mask: Mask

    @classmethod
    def of(cls, problem: DecodeProblem, q: int, mask: Mask) -> Block:
        """A block of a problem."""
        return cls(
            problem.num_q_heads,
            problem.q_dtype,
            problem.kv_dtype,
            problem.needs_lse,
            q,
            mask,
        )

    @property
    def dtypes(self) -> tuple[str, str]:
        """Of the query and of the cache."""
        return self.q_dtype, self.kv_dtype

    @property
    def heads(self) -> int:
        """Heads that AITER is given."""
        return AiterMLAHelper.get_actual_mla_num_heads(self.num_q_heads)


class RouteKind(str, enum.Enum):
    """AITER's ways to decode with MLA, those that this adapter takes marked so."""

    SCHEDULED = "scheduled"
    """Assembly kernel with a schedule. Taken."""
    UNSCHEDULED = "unscheduled"
    """Assembly kernel without one. Taken, for causal blocks."""
    GLUON = "gluon"
    """Gluon decode and verify: masks the tail, has no other mode."""
    DCP_SEGMENTED = "dcp_segmented"
    """Verify under DCP, a segment of the KV at a time: causal only."""
    DCP_ROUND_ROBIN = "dcp_round_robin"
    """Verify under DCP on global positions: causal only."""


ROUTES: Mapping[Mask, tuple[RouteKind, ...]] = MappingProxyType(
    {
        Mask.NON_CAUSAL: (RouteKind.SCHEDULED,),
        Mask.CAUSAL: (
            RouteKind.SCHEDULED,
            RouteKind.UNSCHEDULED,
            RouteKind.GLUON,
            RouteKind.DCP_SEGMENTED,
            RouteKind.DCP_ROUND_ROBIN,
        ),
    }
)
"""What a block of each mask may reach. The mask is the first key: a non-causal block
finds no way that masks, whatever else is asked of it."""
TAKEN = (RouteKind.SCHEDULED, RouteKind.UNSCHEDULED)
"""The ways that this adapter takes itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How blocks of one length and mask are decoded."""

    kind: RouteKind
    key: KernelKey
    heads: int
    """Heads that AITER is given: the problem's, padded."""
    walks: int
    """Passes over a request's KV."""
    declined: tuple[Refusal, ...] = ()
    """Why the way that the gate wants has no kernel, where another one is taken."""

    @property
    def keeps_schedule(self) -> bool:
        """Whether `build` makes a schedule."""
        return self.kind is RouteKind.SCHEDULED


def wants_schedule(block: Block) -> bool:
    """The gate of the persistent schedule.

    A non-causal block always has one: nothing else carries its mask. A causal block
    has one for 16 heads and more, for up to 4 tokens, and over an fp8 cache.
    """
    return (
        block.mask is Mask.NON_CAUSAL
        or block.num_q_heads >= 16
        or block.q <= 4
        or block.kv_dtype == "fp8"
    )


def choose_route(
    facts: Facts, block: Block, variables: LeavingVariables
) -> Route | list[Refusal]:
    """The way of a block, or every reason why it has none.

    Of the ways that have a kernel, the one with the fewest KV walks is taken; among
    equals the gate's. A one-token block sees every key under either mask.
    """
    if block.q == 1:
        block = block._replace(mask=Mask.CAUSAL)
    gate = RouteKind.SCHEDULED
    if not wants_schedule(block):
        gate = RouteKind.UNSCHEDULED
    kinds = [kind for kind in ROUTES[block.mask] if kind in TAKEN]
    found: list[Route] = []
    refused: list[Refusal] = []
    for kind in sorted(kinds, key=lambda kind: kind is not gate):
        route = _try(facts, block, kind, variables)
        if isinstance(route, Route):
            found.append(route)
        else:
            refused.extend(route)
    if found:
        best = min(found, key=lambda route: route.walks)
        return best if best.kind is gate else replace(best, declined=tuple(refused))
    if _is_fp8_pair(facts, block):
        return _two_token(facts, block, refused)
    return refused[:1]


def _try(
    facts: Facts, block: Block, kind: RouteKind, variables: LeavingVariables
) -> Route | list[Refusal]:
    heads, dtypes = block.heads, block.dtypes
    persistent = kind is RouteKind.SCHEDULED
    if facts.profile is None:
        return probed_route(facts, block, kind)
    found = facts.resolve(
        heads,
        block.q,
        dtypes,
        persistent=persistent,
        causal=block.mask is Mask.CAUSAL,
        lse=block.needs_lse,
    )
    if isinstance(found, Refusal):
        return [_in_own_heads(found, block)]
    limits = kernel_limits(
        facts, found, dtypes, block.mask, persistent=persistent, variables=variables
    )
    if limits:
        return [_in_own_heads(limit, block) for limit in limits]
    walks = kv_walks(facts.profile, facts.arch, dtypes, found, persistent=persistent)
    return Route(kind=kind, key=found, heads=heads, walks=walks)


def _in_own_heads(reason: Refusal, block: Block) -> Refusal:
    """The reason with the model's heads beside those that AITER would be given."""
    if block.heads == block.num_q_heads:
        return reason
    padded = f"{block.num_q_heads} heads, {block.heads} after padding"
    return replace(reason, got=f"{padded}; {reason.got}")


def probed_route(facts: Facts, block: Block, kind: RouteKind) -> Route | list[Refusal]:
    """The way of a block on a release that nobody has read: what a probe saw work.

    Walks and folds are unknown and counted at their worst.
    """
    from mla_decode_rocm_aiter.probe.record import (  # noqa: PLC0415 - only where unread
        driver_version,
        read_record,
        record_path,
    )
    from mla_decode_rocm_aiter.probe.shapes import ProbeShape  # noqa: PLC0415 - as above

    heads, q = block.heads, block.q
    causal = block.mask is Mask.CAUSAL
    shape = ProbeShape(
        heads=heads,
        q=q,
        q_dtype=block.q_dtype,
        kv_dtype=block.kv_dtype,
        causal=causal,
        lse=block.needs_lse,
    )
    path = record_path(facts.release, facts.arch, driver_version())
    seen = read_record(path).get(shape)
    if seen is not None and seen.outcome == "works" and kind is RouteKind.SCHEDULED:
        groups = heads // 16
        key = KernelKey(
            gqa=16,
            qseqlen=q,
            causal=int(causal),
            persistent=True,
            lse=block.needs_lse,
            heads=16,
            q=q,
            fold=groups,
            q_per_call=q,
            kernels=("seen by a probe",),
        )
        return Route(kind=kind, key=key, heads=heads, walks=groups * q)
    happened = f"; a probe saw: {seen.outcome} ({seen.detail})" if seen else ""
    return [
        Refusal(
            code=RefusalCode.VERSION,
            message=f"nobody has read what AITER {facts.release} does with this block",
            got=f"AITER {facts.release}, {shape}{happened}",
            allowed="a release with a profile, or a shape that a probe saw work",
            fix="run `mla-decode probe rocm_aiter` on the GPU"
            if seen is None
            else "use another block, lowering='exact', or triton_mla",
        )
    ]


def _is_fp8_pair(facts: Facts, block: Block) -> bool:
    return (
        facts.has_non_causal_kernels
        and block.mask is Mask.NON_CAUSAL
        and block.q == 2
        and block.kv_dtype == "fp8"
    )


def _two_token(facts: Facts, block: Block, refused: list[Refusal]) -> list[Refusal]:
    """The hole that engines know: say it in their words, with the padded heads."""
    first, heads = refused[0], block.num_q_heads
    unpadded = "" if heads != block.heads else f"{heads} heads, {heads} after padding; "
    return [
        Refusal(
            code=first.code,
            message="AITER has no non-causal kernel for this 2-token block over an fp8 "
            f"cache: {first.message}",
            got=unpadded + first.got,
            allowed=f"{_fp8_pair_heads(facts)} heads after padding, or another length",
            fix="lower it with lowering='exact' (3 tokens have kernels), or draft with "
            "triton_mla",
        )
    ]


def _fp8_pair_heads(facts: Facts) -> str:
    served = [
        str(heads)
        for heads in range(16, 129, 16)
        if not isinstance(
            facts.resolve(
                heads, 2, ("fp8", "fp8"), persistent=True, causal=False, lse=False
            ),
            Refusal,
        )
    ]
    return ", ".join(served) or "no"
