"""The list of mutants: names are literal and stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_decode_contract.clauses import Clause
from mla_decode_contract.mutants import conduct, layout, outputs, state, values
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


_C = Clause
_ALL = (
    _mutant(_C.BACKEND, conduct.non_causal_overclaimed),
    _mutant(_C.BACKEND, conduct.cost_without_walks),
    _mutant(_C.VERSION, conduct.newer_contract),
    _mutant(_C.MASK, values.mask_ignored, "causal_block"),
    _mutant(_C.MASK, values.mask_off_by_one),
    _mutant(_C.MASK, values.mask_prefix_only),
    _mutant(_C.MASK, values.mask_one_too_many, "causal_block"),
    _mutant(_C.MASK, values.mask_head_aligned, "causal_block"),
    _mutant(_C.MASK, values.mask_rows_reversed, "causal_block"),
    _mutant(_C.MASK, values.mask_always_causal, "non_causal"),
    _mutant(_C.MASK, values.mask_causal_at_one_length, "non_causal"),
    _mutant(_C.MASK, values.mask_lost_at_one_length, "causal_block"),
    _mutant(_C.BLOCK, outputs.pad_rows_unwritten),
    _mutant(_C.LENGTHS, values.last_key_dropped),
    _mutant(_C.LENGTHS, values.whole_pages_only),
    _mutant(_C.LENGTHS, values.requests_past_8_lost),
    _mutant(_C.LENGTHS, values.requests_past_64_lost),
    _mutant(_C.SCALE, values.scale_of_576),
    _mutant(_C.SCALE, values.scale_squared),
    _mutant(_C.SCALE, values.fp8_scales_ignored, "fp8"),
    _mutant(_C.SCALE, layout.first_scale_kept, "fp8"),
    _mutant(_C.SCALE, conduct.scale_has_a_default),
    _mutant(_C.EMPTY, outputs.empty_lse_plus_inf),
    _mutant(_C.EMPTY, outputs.empty_lse_zero),
    _mutant(_C.EMPTY, outputs.empty_lse_nan),
    _mutant(_C.EMPTY, outputs.empty_out_nan),
    _mutant(_C.EMPTY, state.empties_of_the_shape),
    _mutant(_C.LSE, outputs.lse_log2, "lse"),
    _mutant(_C.LSE, outputs.lse_negated, "lse"),
    _mutant(_C.LSE, outputs.lse_exponentiated, "lse"),
    _mutant(_C.LSE, outputs.lse_heads_rolled, "lse"),
    _mutant(_C.LSE, outputs.lse_in_half, "lse"),
    _mutant(_C.OUT, outputs.last_row_unwritten),
    _mutant(_C.OUT, outputs.out_not_in_place),
    _mutant(_C.OUT, outputs.out_written_past_its_end),
    _mutant(_C.OUT, outputs.out_written_before_its_start),
    _mutant(_C.READS, values.page_tail_read),
    _mutant(_C.READS, values.logical_pages),
    _mutant(_C.READS, values.pages_reversed),
    _mutant(_C.READS, values.first_page_repeated),
    _mutant(_C.READS, values.page_after_each),
    _mutant(_C.READS, layout.address_in_32_bits),
    _mutant(_C.READS, layout.query_taken_as_packed),
    _mutant(_C.READS, conduct.query_scaled_in_place),
    _mutant(_C.READS, conduct.table_tail_cleared),
    _mutant(_C.HEADS, outputs.last_head_copied),
    _mutant(_C.HEADS, outputs.heads_reversed),
    _mutant(_C.HEADS, outputs.last_head_zero),
    _mutant(_C.HEADS, layout.last_odd_head_lost, "odd_heads"),
    _mutant(_C.DTYPE, layout.weights_in_fp8, "fp8"),
    _mutant(_C.STALE, state.stale_schedule),
    _mutant(_C.STALE, state.stale_metadata_served),
    _mutant(_C.STABLE, conduct.workspace_grows),
    _mutant(_C.STABLE, conduct.workspace_undeclared),
    _mutant(_C.STABLE, layout.buffers_renewed, "graphs"),
    _mutant(_C.UBATCH, layout.thread_of_the_build),
    _mutant(_C.UBATCH, state.ubatch_state_on_class),
    _mutant(_C.UBATCH, conduct.environment_written),
    _mutant(_C.UBATCH, conduct.environment_written_alike),
    _mutant(_C.UBATCH, conduct.random_state_consumed),
    _mutant(_C.SYNC, conduct.outputs_leaked),
    _mutant(_C.VALIDATE, conduct.writes_before_checking),
    _mutant(_C.VALIDATE, conduct.untyped_errors),
    _mutant(_C.REFUSE, conduct.abort_instead_of_refusal),
    _mutant(_C.REFUSE, conduct.exit_instead_of_refusal),
    _mutant(_C.REFUSE, conduct.assertion_instead_of_refusal),
    _mutant(_C.REFUSE, conduct.refuses_nothing),
    _mutant(_C.REFUSE, conduct.first_refusal_only),
    _mutant(_C.REFUSE, conduct.refuses_with_another_code),
    _mutant(_C.REFUSE, conduct.refusals_without_a_fix),
    _mutant(_C.DCP, values.dcp_global_lengths, "dcp"),
    _mutant(_C.REPEAT, outputs.noise_between_calls),
    _mutant(_C.REPEAT, outputs.bits_of_the_batch, "batch_invariance"),
    _mutant(_C.REPEAT, outputs.bits_of_the_block, "batch_invariance", "causal_block"),
)

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in _ALL}
"""Every mutant by name."""
