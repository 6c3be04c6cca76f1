"""From a problem to the way of each of its blocks, or to every reason against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode import Mask, OutdatedLibraryError, Refusal, RefusalCode
from mla_decode_rocm_aiter.capability import CAPABILITY
from mla_decode_rocm_aiter.facts import Facts, find_facts
from mla_decode_rocm_aiter.gates import arch_has_non_causal
from mla_decode_rocm_aiter.library import outdated, refused
from mla_decode_rocm_aiter.profiles import first_release_with_causal
from mla_decode_rocm_aiter.routes import Route, choose_route
from mla_decode_rocm_aiter.workspace import LARGEST_INDEX_BYTES, index_entries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode import DecodeProblem, DeviceInfo

Routes = dict[tuple[int, bool], Route]


def plan_problem(problem: DecodeProblem, device: DeviceInfo) -> tuple[Facts, Routes]:
    """The way of every block of a problem.

    Raises:
        OutdatedLibraryError: Only a newer AITER has a mask on this arch.
        BackendRefused: With every reason.
    """
    reasons = problem_refusals(problem, device)
    facts = find_facts(device)
    if isinstance(facts, Refusal):
        raise refused(*(reasons or [facts]))
    needs_mask = problem.needs_non_causal and arch_has_non_causal(device.arch)
    if needs_mask and not facts.has_causal:
        raise outdated(facts.release)
    if reasons:
        raise refused(*reasons)
    return facts, _routes(facts, problem)


def _routes(facts: Facts, problem: DecodeProblem) -> Routes:
    found: Routes = {}
    for q, mask in problem.blocks():
        route = choose_route(facts, problem, q, mask)
        if isinstance(route, Route):
            found[q, mask is Mask.CAUSAL] = route
    return found


def problem_refusals(problem: DecodeProblem, device: DeviceInfo) -> list[Refusal]:
    """Every reason why AITER cannot serve a problem on a device; empty: it can."""
    reasons = CAPABILITY.refusals(problem, device)
    if CAPABILITY.row(device.arch) is None:
        return reasons
    reasons += _fp16(problem)
    reasons += _index_list(problem)
    facts = find_facts(device)
    if isinstance(facts, Refusal):
        return [*reasons, facts]
    reasons += _non_causal_gates(facts, problem)
    seen = {reason.message for reason in reasons}
    for q, mask in problem.blocks():
        for reason in _block_reasons(facts, problem, q, mask):
            if reason.message not in seen:
                seen.add(reason.message)
                reasons.append(reason)
    return reasons


def refuse_block(
    facts: Facts, problem: DecodeProblem, q: int, mask: Mask
) -> list[Refusal]:
    """Why one block cannot be served, for a batch outside the problem."""
    return list(_block_reasons(facts, problem, q, mask))


def _block_reasons(
    facts: Facts, problem: DecodeProblem, q: int, mask: Mask
) -> Iterator[Refusal]:
    row = CAPABILITY.row(facts.arch)
    dtypes = (problem.q_dtype, problem.kv_dtype)
    if row is None or dtypes not in row.dtypes:
        return
    if problem.num_q_heads not in row.num_q_heads:
        return
    if mask is Mask.NON_CAUSAL and not facts.has_non_causal_kernels():
        if problem.needs_lse and not _has_lse(facts, dtypes):
            yield _no_lse(facts, dtypes)
        return
    if q not in row.query_lens.get(mask, ()):
        return
    found = choose_route(facts, problem, q, mask)
    if isinstance(found, Route):
        return
    yield from found
    is_named = any(reason.code is RefusalCode.LSE for reason in found)
    if problem.needs_lse and not is_named and not _has_lse(facts, dtypes):
        yield _no_lse(facts, dtypes)


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


def _non_causal_gates(facts: Facts, problem: DecodeProblem) -> Iterator[Refusal]:
    """The gates in their order: the arch (the capability's row), the signature, the
    installed kernel table.
    """
    if not problem.needs_non_causal or not arch_has_non_causal(facts.arch):
        return
    if not facts.has_causal:
        yield as_refusal(outdated(facts.release))
    elif not facts.has_non_causal_kernels():
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
