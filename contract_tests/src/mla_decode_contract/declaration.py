"""What a backend declares, and what it accepts shape by shape: data for the report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_decode.mask import Mask
from mla_decode.selection import survey
from mla_decode_contract.context import CaseContext
from mla_decode_contract.target import as_candidates
from mla_decode_contract.violations import ContractViolation, DeclaredUnsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode.backend import Backend
    from mla_decode.capability import IntSet
    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem

GRID_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
GRID_QUERY_LENS = (1, 2, 3, 4, 5, 6, 7, 8, 16)


def declaration(backend: Backend, device: DeviceInfo) -> dict[str, Any] | None:
    """The capability row of a device, and the backend's answers over a grid of shapes.

    Args:
        backend: Prepared already, so that `refusals` knows its library.
        device: The run's.

    Returns:
        ``row``: the declared limits. ``base``: the problem that the grid varies, the
        plainest one that is accepted; None where none is. ``cells``: heads, query
        length, mask and the codes of refusal (none: accepted). None where the
        capability has no row for the device.
    """
    row = backend.capability.row(device.arch)
    if row is None:
        return None
    base = _base(backend, device)
    return {
        "row": {
            "arch": row.arch,
            "source": row.source.value,
            "dtypes": sorted(map(list, row.dtypes)),
            "out_dtypes": sorted(row.out_dtypes),
            "page_sizes": _numbers(row.page_sizes),
            "num_q_heads": _numbers(row.num_q_heads),
            "query_lens": {
                mask.value: _numbers(lens) for mask, lens in row.query_lens.items()
            },
            "features": {
                feature.value: support.value
                for feature, support in row.features.items()
            },
            "max_num_reqs": row.max_num_reqs,
            "max_model_len": row.max_model_len,
        },
        "base": None if base is None else base.as_dict(),
        "cells": [] if base is None else list(_cells(backend, device, base)),
    }


def _base(backend: Backend, device: DeviceInfo) -> DecodeProblem | None:
    drawn = CaseContext(case_id="declaration", backend=backend, device=device)
    try:
        return replace(drawn.problem(), needs_lse=False)
    except (ContractViolation, DeclaredUnsupported):
        return None  # the cases say why: every one of them fails


def _cells(
    backend: Backend, device: DeviceInfo, base: DecodeProblem
) -> Iterator[dict[str, Any]]:
    for heads in GRID_HEADS:
        for query_len in GRID_QUERY_LENS:
            for mask in Mask if query_len > 1 else (Mask.CAUSAL,):
                asked = replace(
                    base,
                    num_q_heads=heads,
                    query_lens=frozenset({query_len}),
                    masks=frozenset({mask}),
                )
                yield {
                    "num_q_heads": heads,
                    "query_len": query_len,
                    "mask": mask.value,
                    "refused": _refused(backend, asked, device),
                }


def _refused(backend: Backend, asked: DecodeProblem, device: DeviceInfo) -> list[str]:
    """Codes against a problem, as an engine that asks for the backend would get them."""
    found = survey(
        asked, device, backend=backend.name, candidates=as_candidates(backend)
    )
    if found.outdated is not None:
        return ["version"]
    if found.selection is not None:
        return []
    return sorted({r.code.value for reasons in found.refused.values() for r in reasons})


def _numbers(allowed: IntSet) -> dict[str, int] | list[int]:
    """A range by its ends, a set by its members."""
    if isinstance(allowed, range) and len(allowed):
        return {"first": allowed[0], "last": allowed[-1], "step": allowed.step}
    return sorted(allowed)
