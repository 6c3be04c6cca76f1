"""Lowered decoding equals the reference, whatever the rewrite."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mla_decode import BackendRefused, Dcp, Mask, MLADecoder
from mla_decode.lowering import buffers
from mla_decode.lowering.backend import LoweredBackend
from mla_decode.reference.oracle import decode_oracle

SCALE = 192**-0.5


def error_of(output, common, q, cache, *, causal):
    out, lse = decode_oracle(
        q,
        cache,
        common.block_table_tensor,
        common.seq_lens,
        common.query_start_loc_cpu,
        causal=causal,
        softmax_scale=SCALE,
    )
    worst = float((output.out.double() - out).abs().max())
    finite = torch.isfinite(lse)
    assert torch.equal(torch.isfinite(output.lse), finite)
    if bool(finite.any()):
        delta = output.lse.double()[finite] - lse[finite]
        worst = max(worst, float(delta.abs().max()))
    return worst


@pytest.fixture(scope="session")
def problem_of():
    from mla_decode import DecodeProblem

    def make(heads, query_lens, masks, **kwargs):
        return DecodeProblem(
            num_q_heads=heads,
            q_dtype="fp32",
            kv_dtype="fp32",
            out_dtype="fp32",
            page_size=16,
            query_lens=frozenset(query_lens),
            masks=frozenset(masks),
            needs_lse=True,
            max_num_reqs=kwargs.pop("max_num_reqs", 4),
            max_model_len=128,
            **kwargs,
        )

    return make


CASES = [
    pytest.param({(1, Mask.CAUSAL, 24): 1}, 4, 6, Mask.NON_CAUSAL, "fold", id="fold"),
    pytest.param({(1, Mask.CAUSAL, 32): 1}, 4, 6, Mask.NON_CAUSAL, "pad", id="pad"),
    pytest.param(
        {(1, Mask.CAUSAL, 8): 1}, 4, 6, Mask.NON_CAUSAL, "split", id="split-even"
    ),
    pytest.param(
        {(1, Mask.CAUSAL, 16): 1}, 4, 6, Mask.NON_CAUSAL, "split", id="split-rest"
    ),
    pytest.param(
        {(1, Mask.CAUSAL, 16): 1}, 3, 7, Mask.NON_CAUSAL, "split", id="split-rest-wide"
    ),
    pytest.param(
        {(8, Mask.NON_CAUSAL, 4): 1}, 4, 5, Mask.NON_CAUSAL, "pad", id="tokens"
    ),
    pytest.param(
        {(6, Mask.NON_CAUSAL, 16): 1}, 4, 6, Mask.NON_CAUSAL, "pad", id="heads"
    ),
    pytest.param({(6, Mask.CAUSAL, 16): 1}, 4, 6, Mask.CAUSAL, "pad", id="causal-wide"),
    pytest.param({(1, Mask.CAUSAL, 4): 1}, 4, 6, Mask.CAUSAL, "split", id="causal"),
    pytest.param(
        {(1, Mask.CAUSAL, 16): 1}, 4, 6, Mask.CAUSAL, "split", id="causal-split-wide"
    ),
    pytest.param({(1, Mask.CAUSAL, 16): 1}, 4, 1, Mask.CAUSAL, "pad", id="one-token"),
]


@pytest.mark.parametrize(("walks", "heads", "query_len", "mask", "kind"), CASES)
def test_a_rewrite_gives_the_reference_values(
    narrow, decoder, batch_of, problem_of, walks, heads, query_len, mask, kind
):
    causal = mask is Mask.CAUSAL
    lowered = decoder(narrow(walks), problem_of(heads, {query_len}, {mask}))
    assert lowered.selection.plan.kind == kind
    lens = [query_len, 33, 0, 64]
    common, q, cache = batch_of(lens, [query_len] * 4, causal=causal, heads=heads)
    out = torch.full((q.shape[0], heads, 512), torch.nan)
    output = lowered.run(q, cache, lowered.plan(common), softmax_scale=SCALE, out=out)
    assert output.out is out
    assert error_of(output, common, q, cache, causal=causal) < 1e-4
    assert lowered.report().lowering["kind"] == kind


@settings(max_examples=30)
@given(
    heads=st.sampled_from((1, 2, 3, 4)),
    query_len=st.integers(1, 6),
    mask=st.sampled_from(list(Mask)),
    widths=st.sets(st.sampled_from((1, 2, 4, 6, 8, 16, 32)), min_size=1, max_size=3),
    lens=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_plan_over_any_batch_equals_the_oracle(
    narrow, decoder, batch_of, problem_of, heads, query_len, mask, widths, lens, seed
):
    backend = narrow({(1, Mask.CAUSAL, width): 1 for width in widths})
    problem = problem_of(heads, {query_len}, {mask})
    lens = [0 if n < query_len else n for n in lens]
    causal = mask is Mask.CAUSAL
    try:
        lowered = decoder(backend, problem)
    except BackendRefused:
        return
    common, q, cache = batch_of(
        lens, [query_len] * len(lens), causal=causal, heads=heads, seed=seed
    )
    output = lowered.run(q, cache, lowered.plan(common), softmax_scale=SCALE)
    assert error_of(output, common, q, cache, causal=causal) < 1e-4


def test_a_fold_of_a_contiguous_query_copies_nothing(
    narrow, decoder, batch_of, problem_of, monkeypatch
):
    backend = narrow({(1, Mask.CAUSAL, 24): 1})
    lowered = decoder(backend, problem_of(4, {6}, {Mask.NON_CAUSAL}))
    common, q, cache = batch_of([33, 64], [6, 6], causal=False)
    seen = {}

    def record(call):
        seen.update(q=call.q, out=call.out)
        call.out.zero_()
        call.lse.zero_()

    monkeypatch.setattr(backend, "_forward", record, raising=False)
    output = lowered.run(q, cache, lowered.plan(common), softmax_scale=SCALE)
    assert seen["q"].data_ptr() == q.data_ptr()
    assert seen["out"].data_ptr() == output.out.data_ptr()
    assert seen["q"].shape == (2, 24, 576)


def test_virtual_tables_keep_their_addresses_over_builds(
    narrow, decoder, batch_of, problem_of
):
    backend = narrow({(1, Mask.CAUSAL, 8): 1})
    lowered = decoder(backend, problem_of(4, {6}, {Mask.NON_CAUSAL}))
    addresses = set()
    for lens in ([33, 64], [40, 71], [6, 6]):
        common, _, _ = batch_of(lens, [6, 6], causal=False)
        inner = lowered.plan(common).inner
        addresses.add((inner.block_table.data_ptr(), inner.seq_lens.data_ptr()))
        assert inner.seq_lens.tolist() == [n for n in lens for _ in range(3)]
    assert len(addresses) == 1


def test_a_lowered_step_goes_stale_like_any_other(
    narrow, decoder, batch_of, problem_of
):
    from mla_decode import StaleMetadataError

    lowered = decoder(
        narrow({(1, Mask.CAUSAL, 24): 1}), problem_of(4, {6}, {Mask.NON_CAUSAL})
    )
    common, q, cache = batch_of([33, 64], [6, 6], causal=False)
    first = lowered.plan(common)
    lowered.plan(common)
    with pytest.raises(StaleMetadataError, match="newest"):
        lowered.run(q, cache, first, softmax_scale=SCALE)


def test_refuse_is_the_default_and_exact_is_asked_for(narrow, problem_of):
    from mla_decode import Candidate

    backend = narrow({(1, Mask.CAUSAL, 24): 1})
    candidates = {"narrow": Candidate(name="narrow", backend=backend)}
    problem = problem_of(4, {6}, {Mask.NON_CAUSAL})
    with pytest.raises(BackendRefused):
        MLADecoder(problem, "narrow", device="cpu", candidates=candidates)
    lowered = MLADecoder(
        problem, "narrow", "exact", device="cpu", candidates=candidates
    )
    assert isinstance(lowered.backend, LoweredBackend)
    assert lowered.selection.backend is backend
    assert not backend.builder_cls.supports_non_causal_multi_token_decode


def test_a_causal_block_under_dcp_splits_into_rows_of_local_lengths(
    narrow, decoder, batch_of, problem_of
):
    from dataclasses import replace

    from mla_decode.dcp import local_seq_lens

    dcp = Dcp(world=2, rank=1, interleave=4)
    backend = narrow({(1, Mask.CAUSAL, 4): 1})
    lowered = decoder(backend, problem_of(4, {3}, {Mask.CAUSAL}, dcp=dcp))
    common, _, _ = batch_of([17, 9, 0], [3, 3, 3], causal=True)
    local = torch.tensor(
        [local_seq_lens(n, dcp) for n in (17, 9, 0)], dtype=torch.int32
    )
    inner = lowered.plan(replace(common, dcp_local_seq_lens=local)).inner
    expected = [
        local_seq_lens(max(total - 3 + token + 1, 0), dcp)
        for total in (17, 9, 0)
        for token in range(3)
    ]
    assert inner.seq_lens.tolist() == expected


def _wrong_row_order(monkeypatch):
    original = buffers.PaddedRows.enter

    def reversed_rows(self, query, num_reqs):
        q, out, lse = original(self, query, num_reqs)
        return q.flip(1), out, lse

    monkeypatch.setattr(buffers.PaddedRows, "enter", reversed_rows)


def _table_repeated_in_the_wrong_order(monkeypatch):
    original = buffers.VirtualTables.__init__

    def swapped(self, problem, rewrite, device):
        original(self, problem, rewrite, device)
        self._row_of ^= 1

    monkeypatch.setattr(buffers.VirtualTables, "__init__", swapped)


def _lengths_of_the_whole_block(monkeypatch):
    original = buffers.VirtualTables.__init__

    def unmasked(self, problem, rewrite, device):
        original(self, problem, rewrite, device)
        self._hidden.zero_()

    monkeypatch.setattr(buffers.VirtualTables, "__init__", unmasked)


def _pad_rows_left_in_the_lse(monkeypatch):
    def shifted(self, padded, real_rows, num_reqs):
        for real, inside in self._pieces(real_rows, padded, num_reqs):
            real.copy_(inside.roll(1, dims=1) if padded.dim() == 2 else inside)

    monkeypatch.setattr(buffers.PaddedRows, "leave", shifted)


@pytest.mark.parametrize(
    ("mutate", "walks", "query_len", "mask"),
    [
        (_wrong_row_order, {(1, Mask.CAUSAL, 16): 1}, 7, Mask.NON_CAUSAL),
        (
            _table_repeated_in_the_wrong_order,
            {(1, Mask.CAUSAL, 8): 1},
            6,
            Mask.NON_CAUSAL,
        ),
        (_lengths_of_the_whole_block, {(1, Mask.CAUSAL, 4): 1}, 6, Mask.CAUSAL),
        (_pad_rows_left_in_the_lse, {(1, Mask.CAUSAL, 16): 1}, 6, Mask.NON_CAUSAL),
    ],
)
def test_a_wrong_step_is_seen_in_the_values(
    narrow, decoder, batch_of, problem_of, monkeypatch, mutate, walks, query_len, mask
):
    mutate(monkeypatch)
    causal = mask is Mask.CAUSAL
    lowered = decoder(narrow(walks), problem_of(4, {query_len}, {mask}))
    common, q, cache = batch_of([20, 33, 64, 9], [query_len] * 4, causal=causal)
    output = lowered.run(q, cache, lowered.plan(common), softmax_scale=SCALE)
    assert error_of(output, common, q, cache, causal=causal) > 1e-2
