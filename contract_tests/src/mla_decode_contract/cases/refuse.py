"""REFUSE: outside the capability, every reason, typed; inside it, no refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_decode.capability import Feature, Support
from mla_decode.device import DeviceInfo
from mla_decode.errors import BackendRefused
from mla_decode.mask import Mask
from mla_decode.problem import KV_DTYPES, Q_DTYPES, Dcp
from mla_decode.selection import select
from mla_decode_contract.cases.common import serve
from mla_decode_contract.context import least, most
from mla_decode_contract.demand import demand_error, demand_refusal, require_code
from mla_decode_contract.registry import implements
from mla_decode_contract.target import as_candidates
from mla_decode_contract.violations import RefusalViolation, require

if TYPE_CHECKING:
    from mla_decode.problem import DecodeProblem
    from mla_decode_contract.context import CaseContext

LARGEST_PAGE = 512
LARGEST_BLOCK = 64


@implements("refuse.unknown_arch")
def unknown_arch(ctx: CaseContext) -> None:
    """An architecture that no vendor has made."""
    problem = ctx.problem()
    device = DeviceInfo.assume("gfx0ff")
    require(
        ctx.backend.capability.row(device.arch) is None,
        "the capability declares an architecture that does not exist",
    )
    codes = {str(r.code) for r in ctx.backend.refusals(problem, device)}
    require_code(codes, frozenset({"arch"}), "refusals()")
    error = demand_error(
        BackendRefused,
        "a device of an unknown architecture",
        lambda: select(
            problem, device, ctx.backend.name, candidates=as_candidates(ctx.backend)
        ),
    )
    if isinstance(error, BackendRefused):
        require_code(error.codes, frozenset({"arch"}), "select()")


@implements("refuse.page_size_limits")
def page_size_limits(ctx: CaseContext) -> None:
    """At the limit where a test can hold it, and one past it."""
    sizes = ctx.row.page_sizes
    inside = [size for size in range(1, LARGEST_PAGE + 1) if size in sizes]
    at = max(inside, default=least(sizes))
    if at <= LARGEST_PAGE:
        length = min(300, 2 * at + 1)
        problem = replace(ctx.problem(page_size=at), max_model_len=max(512, length))
        serve(ctx, problem, [length])
    _refused(ctx, {"page_size": most(sizes) + 1}, "page_size")


@implements("refuse.num_heads_limits")
def num_heads_limits(ctx: CaseContext) -> None:
    """At the limit by `refusals`; `heads.largest` runs it."""
    largest = most(ctx.row.num_q_heads)
    ctx.problem(num_q_heads=largest)
    _refused(ctx, {"num_q_heads": largest + 1}, "num_heads")


@implements("refuse.causal_query_len_limits")
def causal_query_len(ctx: CaseContext) -> None:
    """The longest causal block."""
    _query_len_limits(ctx, Mask.CAUSAL)


@implements("refuse.non_causal_query_len_limits")
def non_causal_query_len(ctx: CaseContext) -> None:
    """The longest non-causal block."""
    _query_len_limits(ctx, Mask.NON_CAUSAL)


def _query_len_limits(ctx: CaseContext, mask: Mask) -> None:
    allowed = ctx.row.query_lens.get(mask, range(0))
    if not len(allowed):
        ctx.problem(query_lens=(2,), masks=(mask,))
        return
    inside = [length for length in range(1, LARGEST_BLOCK + 1) if length in allowed]
    at = max(inside, default=least(allowed))
    problem = ctx.problem(query_lens=(at,), masks=(mask,))
    if at <= LARGEST_BLOCK:
        serve(ctx, problem, [at, at + 9], causal=mask is Mask.CAUSAL)
    past = most(allowed) + 1
    changes: dict[str, Any] = {
        "query_lens": frozenset({past}),
        "masks": frozenset({mask}),
        "max_model_len": max(512, past + 16),
    }
    _refused(ctx, changes, "query_len")


@implements("refuse.undeclared_dtypes")
def undeclared_dtypes(ctx: CaseContext) -> None:
    """All pairs of the contract's words."""
    base = ctx.problem()
    pairs = {(q, kv) for q in Q_DTYPES for kv in KV_DTYPES} - ctx.row.dtypes
    for q_dtype, kv_dtype in sorted(pairs):
        problem = replace(base, q_dtype=q_dtype, kv_dtype=kv_dtype)
        demand_refusal(ctx, problem, {"dtype", "kv_dtype"})
    ctx.notes.append(f"{len(pairs)} undeclared pairs were refused")


@implements("refuse.batch_limits")
def batch_limits(ctx: CaseContext) -> None:
    """Most requests and longest sequence, where the row declares them."""
    for name in ("max_num_reqs", "max_model_len"):
        limit = getattr(ctx.row, name)
        if limit is None:
            ctx.notes.append(f"{name}: no limit is declared")
            continue
        ctx.problem(**{name: limit})
        _refused(ctx, {name: limit + 1}, "feature")


@implements("refuse.undeclared_features")
def undeclared_features(ctx: CaseContext) -> None:
    """LSE, DCP, graphs, page strides, split caps and invariance, each alone."""
    base = replace(ctx.problem(), needs_lse=False)
    wanted: dict[Feature, tuple[dict[str, Any], set[str]]] = {
        Feature.LSE: ({"needs_lse": True}, {"lse"}),
        Feature.DCP: ({"dcp": Dcp(world=2)}, {"dcp", "lse"}),
        Feature.GRAPHS: ({"graphs": True}, {"feature"}),
        Feature.PAGE_STRIDE: (
            {"kv_page_stride": (base.page_size + 1) * 576},
            {"feature"},
        ),
        Feature.SPLIT_CAP: ({"max_splits": 4}, {"feature"}),
        Feature.BATCH_INVARIANCE: ({"batch_invariant": True}, {"determinism"}),
    }
    for feature, (changes, codes) in wanted.items():
        support = ctx.row.features.get(feature, Support.NOT_IMPLEMENTED)
        problem = replace(base, **changes)
        if support is not Support.YES:
            demand_refusal(ctx, problem, codes)
            ctx.notes.append(f"{feature.value} ({support.value}) was refused")


@implements("refuse.collects_all")
def collects_all(ctx: CaseContext) -> None:
    """Page size and heads past their limits: both reasons."""
    base = ctx.problem()
    problem = replace(
        base,
        page_size=most(ctx.row.page_sizes) + 1,
        num_q_heads=most(ctx.row.num_q_heads) + 1,
    )
    codes = {str(reason.code) for reason in ctx.refusals(problem)}
    missing = {"page_size", "num_heads"} - codes
    if missing:
        raise RefusalViolation(
            f"refusals() stops early: [{', '.join(sorted(codes))}] lacks "
            f"[{', '.join(sorted(missing))}]"
        )


def _refused(ctx: CaseContext, changes: dict[str, Any], code: str) -> None:
    base: DecodeProblem = ctx.problem()
    demand_refusal(ctx, replace(base, **changes), {code})
