"""Declared limits as lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def limits(report: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Name and text of each declared limit; none where the report has no row."""
    declared = report["declared"]
    return tuple(_lines(declared["row"])) if declared else ()


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "architecture", f"{row['arch']} (source: {row['source']})"
    yield "query / cache dtype", ", ".join(f"{q} / {kv}" for q, kv in row["dtypes"])
    yield "output dtype", ", ".join(row["out_dtypes"])
    yield "page size, tokens", numbers(row["page_sizes"])
    yield "query heads", numbers(row["num_q_heads"])
    for mask in ("causal", "non_causal"):
        allowed = row["query_lens"].get(mask)
        name = f"query length, {mask.replace('_', '-')}"
        yield name, "none past one token" if allowed is None else numbers(allowed)
    for feature, support in sorted(row["features"].items()):
        yield feature.replace("_", " "), support.replace("_", " ")
    for name in ("max_num_reqs", "max_model_len"):
        if row[name] is not None:
            yield name, str(row[name])


def numbers(allowed: dict[str, int] | list[int]) -> str:
    """``1..128``, ``16..64 step 16``, ``16, 64``, or ``none``."""
    if isinstance(allowed, list):
        return ", ".join(map(str, allowed)) or "none"
    step = f" step {allowed['step']}" if allowed["step"] != 1 else ""
    return f"{allowed['first']}..{allowed['last']}{step}"
