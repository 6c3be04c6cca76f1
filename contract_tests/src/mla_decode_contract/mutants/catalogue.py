"""The list of mutants: names are literal and stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode_contract.clauses import Clause
from mla_decode_contract.mutants import state, values
from mla_decode_contract.mutants.mutant import Mutant

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_decode.backend import Backend


def _mutant(clause: Clause, apply: Callable[[Backend], Backend], *needs: str) -> Mutant:
    return Mutant(
        name=apply.__name__,
        clause=clause,
        purpose=(apply.__doc__ or "").strip(),
        apply=apply,
        needs=frozenset(needs),
    )


_ALL = (
    _mutant(Clause.MASK, values.mask_ignored, "causal_block"),
    _mutant(Clause.MASK, values.mask_off_by_one),
    _mutant(Clause.MASK, values.mask_prefix_only),
    _mutant(Clause.LSE, values.lse_log2, "lse"),
    _mutant(Clause.EMPTY, values.empty_lse_plus_inf),
    _mutant(Clause.READS, values.page_tail_read),
    _mutant(Clause.READS, values.logical_pages),
    _mutant(Clause.STALE, state.stale_schedule),
    _mutant(Clause.STALE, state.stale_metadata_served),
    _mutant(Clause.UBATCH, state.ubatch_state_on_class),
    _mutant(Clause.REFUSE, state.abort_instead_of_refusal),
)

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in _ALL}
"""Every mutant by name."""
