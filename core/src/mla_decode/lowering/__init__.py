"""Exact rewrites of a problem that a backend cannot serve into one that it can."""

from mla_decode.lowering.plan import Plan, native_plan

__all__ = ["Plan", "native_plan"]
