"""Exact rewrites of a problem that a backend cannot serve into one that it can."""

from mla_decode.lowering.plan import BlockPlan, Plan, Rewrite
from mla_decode.lowering.planner import native_plan, nearest_refusals, plan_exact

__all__ = [
    "BlockPlan",
    "Plan",
    "Rewrite",
    "native_plan",
    "nearest_refusals",
    "plan_exact",
]
