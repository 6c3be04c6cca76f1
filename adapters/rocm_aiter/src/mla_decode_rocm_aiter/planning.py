"""From a problem to the way of each of its blocks, or to every reason against it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from mla_decode import (
    DeviceInfo,
    Mask,
    OutdatedLibraryError,
    Refusal,
    RefusalCode,
)
from mla_decode_rocm_aiter.capability import CAPABILITY
from mla_decode_rocm_aiter.gates import arch_has_non_causal
from mla_decode_rocm_aiter.library import outdated
from mla_decode_rocm_aiter.profiles import first_release_with_causal
from mla_decode_rocm_aiter.routes import Block, Route, choose_route
from mla_decode_rocm_aiter.workspace import LARGEST_INDEX_BYTES, index_entries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode import DecodeProblem
    from mla_decode_rocm_aiter.facts import Facts
    from mla_decode_rocm_aiter.limits import LeavingVariables

_assumed = lru_cache(maxsize=8)(DeviceInfo.assume)


def declared_refusals(problem: DecodeProblem, arch: str) -> list[Refusal]:
    """Reasons that hold whatever AITER is installed."""
    found = CAPABILITY.refusals(problem, _assumed(arch))
    if CAPABILITY.row(arch) is not None:
        found.extend(_fp16(problem))
        found.extend(_index_list(problem))
    return found


def plan_block(
    facts: Facts, block: Block, variables: LeavingVariables
) -> Route | list[Refusal]:
    """A block's way, or its reasons beside those that the declared row gives."""
    row = CAPABILITY.row(facts.arch)
    if row is None or block.dtypes not in row.dtypes:
        return []
    if block.num_q_heads not in row.num_q_heads:
        return []
    lacks_lse = block.needs_lse and not _has_lse(facts, block.dtypes)
    if block.mask is Mask.NON_CAUSAL and not facts.has_non_causal_kernels:
        return [_no_lse(facts, block.dtypes)] if lacks_lse else []
    if block.q not in row.query_lens.get(block.mask, ()):
        return []
    found = choose_route(facts, block, variables)
    if isinstance(found, Route):
        return found
    is_named = any(reason.code is RefusalCode.LSE for reason in found)
    if lacks_lse and not is_named:
        return [*found, _no_lse(facts, block.dtypes)]
    return found


def _has_lse(facts: Facts, dtypes: tuple[str, str]) -> bool:
    return any(
        row.lse and (row.q_dtype, row.kv_dtype) == dtypes for row in facts.table.rows
    )


def _no_lse(facts: Facts, dtypes: tuple[str, str]) -> Refusal:
    return Refusal(
        code=RefusalCode.LSE,
        message=f"no {facts.arch} kernel with a schedule returns the LSE for a "
        f"{dtypes[0]} query over a {dtypes[1]} cache",
        got=f"needs_lse, kernel table of {facts.table.source}",
        allowed="bf16 over bf16 and fp8 over fp8 on gfx950",
        fix="serve this layer group without LSE and DCP, or with triton_mla",
    )


def _fp16(problem: DecodeProblem) -> Iterator[Refusal]:
    if problem.q_dtype == "fp16" and problem.needs_non_causal:
        yield Refusal(
            code=RefusalCode.DTYPE,
            message="non-causal fp16 MLA decode not supported",
            got=f"fp16 query, {problem.kv_dtype} cache",
            allowed="bf16 or fp8 queries",
            fix="draft in bf16, or with triton_mla, which auto selection goes on to",
        )


def _index_list(problem: DecodeProblem) -> Iterator[Refusal]:
    entries = index_entries(problem)
    if 4 * entries > LARGEST_INDEX_BYTES:
        yield Refusal(
            code=RefusalCode.FEATURE,
            message="the index list of the largest batch passes 2 GiB, where AITER's "
            "32-bit offsets end",
            got=f"max_num_reqs {problem.max_num_reqs} * max_model_len "
            f"{problem.max_model_len} = {entries} entries of 4 bytes",
            allowed=f"{LARGEST_INDEX_BYTES // 4} entries",
            fix="lower max_num_reqs or max_model_len",
        )


def non_causal_gates(facts: Facts, problem: DecodeProblem) -> Iterator[Refusal]:
    """Signature, then kernel table; the arch's own gate is its declared row."""
    if not problem.needs_non_causal or not arch_has_non_causal(facts.arch):
        return
    if not facts.has_causal:
        yield as_refusal(outdated(facts.release))
    elif not facts.has_non_causal_kernels:
        yield Refusal(
            code=RefusalCode.MASK,
            message="the installed AITER's kernel table has no non-causal kernel for "
            "this arch",
            got=f"kernel table {facts.table.source}",
            allowed="rows with causal 0 in a release whose mla_decode_fwd takes causal",
            fix=f"install AITER {first_release_with_causal()} or newer with its hsa "
            "folder, or draft with triton_mla",
        )


def as_refusal(error: OutdatedLibraryError) -> Refusal:
    """An outdated library as a reason among others."""
    return Refusal(
        code=RefusalCode.VERSION,
        message=error.message,
        got=error.got,
        allowed=error.allowed,
        fix=error.fix,
    )
