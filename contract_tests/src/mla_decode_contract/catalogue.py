"""The closed list of cases: literal ids, frozen; a new one comes with a new version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mla_decode_contract.clauses import Clause


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One check of one clause."""

    id: str
    clause: Clause
    purpose: str
    """One sentence: what the case would catch."""
    since: str = "1.0"
    """The contract version that it came in."""
    profile: str = "cpu"
    """``cpu``: runs anywhere. ``device``: only on the hardware itself."""
    features: tuple[str, ...] = ()
    """What it needs; where declared unsupported, the refusal is demanded instead."""
    is_quick: bool = False
    """Whether ``--quick`` runs it."""

    @property
    def family(self) -> str:
        """The group that shares a worker: the id's first word."""
        return self.id.partition(".")[0]

    def is_provisional(self, contract: str) -> bool:
        """Whether a contract's verdict leaves the case out: it is only reported.

        A case counts from the minor after the one that it came in, so that an adapter
        has a release to meet it. The cases of a major's first contract count at once:
        whoever writes to it knows them.

        Args:
            contract: The version of the contract that core has.
        """
        major, minor = _numbers(self.since)
        return minor > 0 and (major, minor) >= _numbers(contract)

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary of what never changes about the case."""
        return {
            "id": self.id,
            "clause": self.clause.value,
            "since": self.since,
            "profile": self.profile,
            "features": list(self.features),
            "quick": self.is_quick,
            "purpose": self.purpose,
        }


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def _case(
    case_id: str,
    clause: Clause,
    purpose: str,
    *features: str,
    quick: bool = False,
    profile: str = "cpu",
    since: str = "1.0",
) -> Case:
    return Case(
        id=case_id,
        clause=clause,
        purpose=purpose,
        since=since,
        features=features,
        is_quick=quick,
        profile=profile,
    )


_C = Clause

CASES: tuple[Case, ...] = (
    # The object and its builder
    _case("backend.import_is_light", _C.BACKEND, "Importing the backend's object loads no kernel library, starts no GPU and leaves the environment alone.", quick=True),
    _case("backend.has_the_protocol", _C.BACKEND, "The object has every member of the protocol, and its name is the one that it was found by.", quick=True),
    _case("backend.cost_is_counted", _C.BACKEND, "An accepted problem has a cost of whole numbers, and its workspace is the one that the cost names.", quick=True),
    _case("backend.non_causal_claims_agree", _C.BACKEND, "supports_non_causal, the capability row and the builder's flag say the same.", quick=True),
    _case("builder.signature_is_frozen", _C.BUILDER, "_build_decode takes the seven parameters of the contract and no mask.", quick=True),
    _case("builder.build_is_final", _C.BUILDER, "build and build_for_capture are core's own.", quick=True),
    _case("builder.called_by_keyword", _C.BUILDER, "_build_decode is called once a build, by keyword, with the lengths and table of the batch."),
    _case("builder.state_is_recorded", _C.BUILDER, "build leaves the ubatch's mask and block length on the instance.", "non_causal"),
    _case("version.is_compatible", _C.VERSION, "The contract that the adapter was written to works with the installed core.", quick=True),
    _case("version.skew_refused", _C.VERSION, "Written to a newer minor, another major or no version at all, the adapter is refused with code version.", quick=True),
    # MASK
    _case("mask.causal.tail_aligned", _C.MASK, "Token t of a causal block sees seq_len - Q + t + 1 keys, on a context of ten.", "causal_block", quick=True),
    _case("mask.causal.row0_hides_sibling", _C.MASK, "The first row of a causal block is what a one-token step over the shorter sequence gives.", "causal_block", quick=True),
    _case("mask.causal.block_is_whole_sequence", _C.MASK, "A causal block as long as its sequence: the first token sees itself only.", "causal_block"),
    _case("mask.causal.block_3", _C.MASK, "A causal block of 3 tokens masks each row at its own key.", "causal_block"),
    _case("mask.causal.block_5", _C.MASK, "A causal block of 5 tokens masks each row at its own key.", "causal_block"),
    _case("mask.causal.block_7", _C.MASK, "A causal block of 7 tokens masks each row at its own key.", "causal_block"),
    _case("mask.non_causal.sees_siblings", _C.MASK, "Every token of a non-causal block of 2 sees all ten keys, its sibling's too.", "non_causal", quick=True),
    _case("mask.non_causal.row0_differs_from_causal", _C.MASK, "Row 0 of a non-causal block differs from the causal one by far more than rounding.", "non_causal", quick=True),
    _case("mask.non_causal.block_3", _C.MASK, "A non-causal block of 3 tokens.", "non_causal"),
    _case("mask.non_causal.block_5", _C.MASK, "A non-causal block of 5 tokens.", "non_causal"),
    _case("mask.non_causal.block_6", _C.MASK, "A non-causal block of 6 tokens.", "non_causal"),
    _case("mask.non_causal.block_7", _C.MASK, "A non-causal block of 7 tokens.", "non_causal"),
    _case("mask.causal.every_block", _C.MASK, "Every declared causal block of up to 16 tokens masks each row at its own key.", "causal_block"),
    _case("mask.non_causal.every_block", _C.MASK, "Every token of every declared non-causal block of up to 16 sees all keys.", "non_causal"),
    _case("mask.one_token_is_both", _C.MASK, "A one-token block gives the same under both spellings of its mask.", quick=True),
    _case("mask.does_not_stick", _C.MASK, "Causal, non-causal and causal again on one builder: each build has its own mask.", "non_causal", "causal_block", quick=True),
    _case("mask.flag_spellings", _C.MASK, "bool, numpy bool, 0-d and uniform CPU tensors name the same mask.", quick=True),
    _case("mask.flag_refused", _C.MASK, "A mixed, empty or non-bool tensor, None and 0 are a MaskError.", quick=True),
    # BLOCK
    _case("block.pads_at_tail", _C.BLOCK, "Pad requests at the tail: their rows are EMPTY, the real ones unmoved.", quick=True),
    _case("block.pads_non_causal", _C.BLOCK, "The same in a non-causal batch of blocks.", "non_causal"),
    _case("block.uncounted_pads", _C.BLOCK, "num_actual_tokens may leave the pads' rows out; the rows are there all the same."),
    _case("block.all_pads", _C.BLOCK, "A batch of pads alone is legal and EMPTY; its Q is max_query_len.", quick=True),
    _case("block.ragged", _C.BLOCK, "Mixed block lengths under the causal mask: served by a VARLEN builder, else a BatchError.", "causal_block"),
    _case("block.ragged_non_causal_refused", _C.BLOCK, "A non-causal batch of mixed block lengths is a BatchError.", "non_causal"),
    _case("block.pad_in_front_refused", _C.BLOCK, "A pad before a real request is a BatchError."),
    _case("block.unnamed_query_len_refused", _C.BLOCK, "A block length that the problem does not name is refused with code query_len.", quick=True),
    _case("block.unnamed_mask_refused", _C.BLOCK, "A mask that the problem does not name is refused with code mask, never served without it.", "causal_block", quick=True),
    # LENGTHS
    _case("lengths.ragged_requests", _C.LENGTHS, "Requests of 1 to 300 keys in one batch.", quick=True),
    _case("lengths.many_requests", _C.LENGTHS, "Seventy requests of a few keys, some of none: none of them is lost."),
    _case("lengths.page_multiples", _C.LENGTHS, "Lengths at, one before and one after exact multiples of the page."),
    _case("lengths.one_key", _C.LENGTHS, "A request of a single key returns that key's value."),
    _case("lengths.non_causal_shorter_than_block", _C.LENGTHS, "A non-causal block may hold more tokens than its sequence has keys.", "non_causal"),
    _case("lengths.causal_shorter_refused", _C.LENGTHS, "A causal block longer than every sequence is a BatchError.", "causal_block"),
    # SCALE
    _case("scale.is_required", _C.SCALE, "softmax_scale is a required keyword without a default.", quick=True),
    _case("scale.invalid_refused", _C.SCALE, "Zero, negative, non-finite, integer and tensor scales are a ValueError.", quick=True),
    _case("scale.is_applied", _C.SCALE, "The caller's scale is used, not one that the width 576 suggests."),
    _case("scale.fp8_is_required", _C.SCALE, "An fp8 cache without its scale, or with a host float, is a ValueError.", "fp8"),
    _case("scale.fp8_is_applied", _C.SCALE, "The scales of fp8 data reach scores and values.", "fp8"),
    _case("scale.fp8_per_layer", _C.SCALE, "Layers with fp8 scales of their own share one metadata.", "fp8"),
    _case("scale.fp8_cache_as_uint8", _C.SCALE, "An fp8 cache may arrive as uint8.", "fp8"),
    _case("scale.unasked_refused", _C.SCALE, "A scale for a tensor that is not fp8 is a ValueError."),
    # EMPTY
    _case("empty.one_request", _C.EMPTY, "A request without keys among others: out 0, lse -inf.", quick=True),
    _case("empty.all_requests", _C.EMPTY, "A batch without a key anywhere."),
    _case("empty.block", _C.EMPTY, "A block of several tokens without a key.", "causal_block"),
    _case("empty.non_causal_block", _C.EMPTY, "A non-causal block without a key.", "non_causal"),
    _case("empty.others_next_step", _C.EMPTY, "One builder, batches of one shape: each step's own requests are empty."),
    # LSE
    _case("lse.natural_log", _C.LSE, "lse is the natural logarithm of the sum of exponentials.", "lse", quick=True),
    _case("lse.large_scores", _C.LSE, "Scores in the hundreds neither overflow nor lose the peak.", "lse"),
    _case("lse.absent_when_not_asked", _C.LSE, "Without needs_lse the output's lse is None.", quick=True),
    _case("lse.buffer_refused_when_not_asked", _C.LSE, "An lse buffer for a problem without needs_lse is a ValueError."),
    # OUT
    _case("out.filled_in_place", _C.OUT, "The caller's out and lse are filled and returned as they are.", quick=True),
    _case("out.allocated", _C.OUT, "Without buffers the outputs have the contract's shapes and dtypes.", quick=True),
    _case("out.every_row_written", _C.OUT, "NaN-filled buffers come back without a NaN, pads' rows too.", quick=True),
    _case("out.canaries", _C.OUT, "Nothing is written outside the caller's buffers, pads' rows included."),
    _case("out.bad_buffers_refused", _C.OUT, "A buffer of another shape, dtype or layout is a ValueError and stays untouched."),
    _case("out.workspace_poisoned", _C.OUT, "What an earlier step left in the builder's workspace does not matter."),
    _case("out.dtypes", _C.OUT, "Each declared output dtype is written."),
    # READS
    _case("reads.table_tail_negative", _C.READS, "Unused table slots may hold -1.", quick=True),
    _case("reads.table_tail_huge", _C.READS, "Unused table slots may hold 2147480000.", quick=True),
    _case("reads.page_tail", _C.READS, "Page slots past seq_len may hold NaN.", quick=True),
    _case("reads.page_tail_large", _C.READS, "Page slots past seq_len may hold keys that would win every softmax."),
    _case("reads.pad_queries", _C.READS, "Query rows of pads may hold NaN.", quick=True),
    _case("reads.page_size_1", _C.READS, "Pages of one token, shuffled.", "page_size"),
    _case("reads.page_size_16", _C.READS, "Pages of 16 tokens, shuffled.", "page_size"),
    _case("reads.page_size_64", _C.READS, "Pages of 64 tokens, shuffled.", "page_size"),
    _case("reads.physical_pages", _C.READS, "Pages are found through the table, in its order.", quick=True),
    _case("reads.shared_pages", _C.READS, "Requests may share the pages of a prefix."),
    _case("reads.page_stride", _C.READS, "Pages that do not lie back to back; the gaps hold NaN.", "page_stride"),
    _case("reads.inputs_unchanged", _C.READS, "Query, cache, table and lengths are left as they were."),
    _case("reads.strided_query", _C.READS, "A query whose rows do not lie back to back."),
    _case("reads.query_pair", _C.READS, "The pair (nope, rope) gives what the joined query gives."),
    _case("reads.query_pair_views", _C.READS, "The pair may be two views of one projection."),
    _case("reads.query_transposed", _C.READS, "A query that was computed head by head, and its first tokens only."),
    _case("reads.table_strides", _C.READS, "Table rows back to back, and a window of a wider table."),
    _case("reads.page_past_2_31", _C.READS, "Pages past 2^31 elements are found: address arithmetic is 64-bit."),
    # HEADS
    _case("heads.smallest", _C.HEADS, "The smallest declared head count.", quick=True),
    _case("heads.largest", _C.HEADS, "The largest declared head count up to 128."),
    _case("heads.every_declared_power", _C.HEADS, "Every declared head count among 1, 2, 4 ... 128."),
    _case("heads.odd", _C.HEADS, "A head count that is no multiple of 16: padding is inert.", "odd_heads"),
    _case("heads.around_multiples", _C.HEADS, "Every declared head count up to 128 that is next to a multiple of 16.", "odd_heads"),
    _case("heads.rows_independent", _C.HEADS, "Changing one head's query changes that head's rows alone."),
    # DTYPE
    _case("dtype.fp16", _C.DTYPE, "A float16 query over a float16 cache.", "fp16"),
    _case("dtype.bf16_over_fp8", _C.DTYPE, "A bfloat16 query over an fp8 cache.", "bf16_fp8"),
    _case("dtype.fp8_long_tail", _C.DTYPE, "2,047 keys that weigh exp(-7) each beside one of weight 1: the tail is not lost in fp8.", "fp8"),
    _case("dtype.global_default_ignored", _C.DTYPE, "torch's default dtype changes nothing."),
    _case("dtype.other_query_refused", _C.DTYPE, "A query or cache of another dtype than the problem's is a StaleMetadataError.", quick=True),
    # STALE
    _case("stale.lengths_changed", _C.STALE, "Metadata used after a later build with other lengths is a StaleMetadataError.", quick=True),
    _case("stale.table_changed", _C.STALE, "The same after a later build with another table."),
    _case("stale.rebuilt_is_current", _C.STALE, "After a rebuild the new metadata gives the new lengths' values."),
    _case("stale.query_shape", _C.STALE, "A query of another batch is a StaleMetadataError.", quick=True),
    _case("stale.cache_geometry", _C.STALE, "A cache of another page size or stride is a StaleMetadataError."),
    _case("stale.foreign_metadata", _C.STALE, "Metadata of another backend's builder, or of none, is a StaleMetadataError."),
    _case("stale.layers_share", _C.STALE, "Several layers with their own query and cache share one metadata.", quick=True),
    # STABLE
    _case("stable.capture_needs_graphs", _C.STABLE, "build_for_capture on a problem without graphs is refused with code feature."),
    _case("stable.addresses", _C.STABLE, "What a graph reads keeps its address over builds of one shape.", "graphs"),
    _case("stable.growing_builds", _C.STABLE, "Over sixty builds of ever longer requests the same holds.", "graphs"),
    _case("stable.workspace_size", _C.STABLE, "The builder's workspace has its size at construction and does not grow with lengths."),
    _case("stable.workspace_is_declared", _C.STABLE, "After a step of the largest batch the builder holds no more device memory than its cost says."),
    _case("stable.replay", _C.STABLE, "A captured graph replayed after later builds gives each build's values.", "graphs", profile="device"),
    _case("stable.replay_growing", _C.STABLE, "Sixty replays over ever longer requests.", "graphs", profile="device"),
    # UBATCH
    _case("ubatch.interleaved_lengths", _C.UBATCH, "Two builders built in turn and called in any order give what each gives alone.", quick=True),
    _case("ubatch.interleaved_masks", _C.UBATCH, "The same where one is causal and the other is not.", "non_causal", "causal_block", quick=True),
    _case("ubatch.threads_in_turn", _C.UBATCH, "Two threads with a builder each, in turn and in each other's place."),
    _case("ubatch.split_keeps_fields", _C.UBATCH, "Micro-batches of a split batch give the rows of the whole."),
    _case("ubatch.split_keeps_mask", _C.UBATCH, "Micro-batches of a non-causal batch stay non-causal.", "non_causal"),
    _case("ubatch.cut_in_block_refused", _C.UBATCH, "A cut inside a block is a BatchError.", "causal_block"),
    _case("ubatch.no_global_state", _C.UBATCH, "Build and forward leave the environment and torch's global settings alone.", quick=True),
    _case("ubatch.current_stream", _C.UBATCH, "Work goes to the current stream.", profile="device"),
    _case("ubatch.two_streams", _C.UBATCH, "Steps of two builders dealt over two streams do not disturb each other.", profile="device"),
    _case("ubatch.threads", _C.UBATCH, "Two threads at the same time, a builder and a stream each.", profile="device"),
    # SYNC
    _case("sync.allocations_bounded", _C.SYNC, "Tensors alive do not grow from step to step."),
    _case("sync.device_memory_bounded", _C.SYNC, "Device memory does not grow from step to step, and no step asks the driver for more.", profile="device"),
    _case("sync.no_synchronisation", _C.SYNC, "Neither build nor forward waits for the device.", profile="device"),
    # VALIDATE
    _case("validate.before_writing", _C.VALIDATE, "A refused call leaves the caller's buffers untouched.", quick=True),
    _case("validate.errors_carry_their_fix", _C.VALIDATE, "Errors say what was asked, what is allowed, and what to do."),
    _case("validate.batch_forms_refused", _C.VALIDATE, "Lengths, starts and tables of a wrong dtype or shape are a BatchError.", quick=True),
    _case("validate.device_finds_bad_slot", _C.VALIDATE, "With validate='device' a used slot outside the cache is a BatchError."),
    _case("validate.device_finds_bad_length", _C.VALIDATE, "With validate='device' a length outside its bound is a BatchError."),
    _case("validate.recovers", _C.VALIDATE, "After a refused build the builder serves the next batch."),
    # REFUSE
    _case("refuse.unknown_arch", _C.REFUSE, "An architecture without a row is refused with code arch.", quick=True),
    _case("refuse.page_size_limits", _C.REFUSE, "The largest declared page size is served, the next one refused."),
    _case("refuse.num_heads_limits", _C.REFUSE, "The most declared heads are accepted, one more refused."),
    _case("refuse.causal_query_len_limits", _C.REFUSE, "The longest declared causal block is served, the next one refused.", "causal_block"),
    _case("refuse.non_causal_query_len_limits", _C.REFUSE, "The longest declared non-causal block is served, the next one refused.", "non_causal"),
    _case("refuse.undeclared_dtypes", _C.REFUSE, "Every undeclared pair of dtypes is refused."),
    _case("refuse.batch_limits", _C.REFUSE, "Declared limits of requests and lengths are accepted, one more refused."),
    _case("refuse.undeclared_features", _C.REFUSE, "Every feature that is not declared is refused, with the backend called anyway.", quick=True),
    _case("refuse.collects_all", _C.REFUSE, "A problem wrong in several ways gets every reason at once.", quick=True),
    # DCP
    _case("dcp.ranks_merge", _C.DCP, "Partial results of two ranks merge by lse to the whole.", "dcp", quick=True),
    _case("dcp.interleave", _C.DCP, "The same with four tokens a turn.", "dcp"),
    _case("dcp.rank_without_keys", _C.DCP, "A rank that holds no key of a request gives (0, -inf).", "dcp"),
    _case("dcp.eight_ranks", _C.DCP, "Partial results of eight ranks merge, some of them without a key.", "dcp"),
    _case("dcp.local_lengths", _C.DCP, "Local lengths are what counting gives, at every length around a turn.", "dcp"),
    _case("dcp.non_causal_block", _C.DCP, "A non-causal block merges over ranks.", "dcp", "non_causal"),
    _case("dcp.local_shorter_than_block", _C.DCP, "Local lengths may be shorter than the block.", "dcp", "non_causal"),
    _case("dcp.causal_block_refused", _C.DCP, "A causal block under DCP is refused with code dcp.", quick=True),
    # REPEAT
    _case("repeat.bit_equal", _C.REPEAT, "The same inputs twice are bit-equal, or the backend says that it is not deterministic.", quick=True),
    _case("repeat.across_builders", _C.REPEAT, "A second builder gives the same bits."),
    _case("repeat.batch_invariant", _C.REPEAT, "A request's bits are the same alone, among others and in another order.", "batch_invariance"),
    _case("repeat.block_invariant", _C.REPEAT, "A token's bits in a causal block are those of its own one-token step.", "batch_invariance", "causal_block"),
)  # fmt: skip
"""Every case of the kit, in the order of the report."""

BY_ID = {case.id: case for case in CASES}
