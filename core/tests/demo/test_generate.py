from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_decode.decoder import MLADecoder
from mla_decode.demo import attention as attention_module
from mla_decode.demo.attention import LatentAttention
from mla_decode.demo.dense import continue_text, draft_logits, target_states
from mla_decode.demo.generate import Generator
from mla_decode.mask import Mask
from mla_decode.selection import Survey, survey

TOKENS = 32


@pytest.fixture(scope="module")
def runs(models, serving, prompts):
    generator = Generator(*models, serving, draft_len=6, num_reqs=len(prompts))
    return (
        generator.plain(prompts, TOKENS),
        generator.speculative(prompts, TOKENS),
        generator.speculative(prompts, TOKENS, Mask.CAUSAL),
    )


def accepted_per_block(run):
    counts = [count for blocks in run.accepted for count in blocks]
    return sum(counts) / len(counts)


def test_speculation_changes_no_token(runs):
    plain, speculative, causal = runs
    assert {len(row) for row in plain.tokens} == {TOKENS}
    assert speculative.tokens == plain.tokens
    assert causal.tokens == plain.tokens


def test_the_non_causal_mask_is_what_the_drafter_lives_on(runs):
    _, speculative, causal = runs
    assert accepted_per_block(speculative) >= 1.3
    assert accepted_per_block(speculative) >= accepted_per_block(causal) + 0.1


def test_decoders_count_each_kind_of_call_under_its_mask(runs, models):
    plain, speculative, causal = runs
    layers, drafter_layers = models[0].shape.num_layers, 2
    steps = max(len(blocks) for blocks in speculative.accepted)
    assert [(k.kind, k.mask, k.query_len, k.count) for k in plain.calls] == [
        ("prompt", "causal", 32, 6 * layers),
        ("decode", "causal", 1, (TOKENS - 1) * layers),
    ]
    assert [(k.kind, k.mask, k.query_len, k.count) for k in speculative.calls] == [
        ("prompt", "causal", 32, 6 * layers),
        ("verify", "causal", 7, steps * layers),
        ("draft", "non_causal", 7, steps * drafter_layers),
    ]
    assert causal.calls[-1].mask == "causal"
    assert {k.backend for k in (*plain.calls, *speculative.calls)} == {"reference"}


def test_text_is_made_of_what_the_decoder_returns(
    monkeypatch, generator, prompts, runs
):
    run = MLADecoder.run

    def zeroed(self, *args, **kwargs):
        output = run(self, *args, **kwargs)
        output.out.zero_()
        return output

    monkeypatch.setattr(MLADecoder, "run", zeroed)
    plain, speculative, _ = runs
    assert generator.plain(prompts[:2], 8).tokens != tuple(
        row[:8] for row in plain.tokens[:2]
    )
    assert generator.speculative(prompts[:2], 8).tokens != tuple(
        row[:8] for row in speculative.tokens[:2]
    )


@pytest.mark.parametrize("draft_len", [1, 3])
def test_shorter_drafts_change_no_token(models, serving, prompts, runs, draft_len):
    generator = Generator(*models, serving, draft_len=draft_len, num_reqs=3)
    speculative = generator.speculative(prompts[:3], 12)
    assert speculative.tokens == tuple(row[:12] for row in runs[0].tokens[:3])
    assert max(map(max, speculative.accepted)) == draft_len


def test_one_token_needs_no_block(generator, prompts, runs):
    speculative = generator.speculative(prompts[:2], 1)
    assert speculative.tokens == tuple(row[:1] for row in runs[0].tokens[:2])
    assert speculative.accepted == ((), ())


def test_the_absorbed_decode_equals_dense_attention(models, generator, prompts):
    attention = LatentAttention(generator.target_group, generator.serving)
    decoded = generator._read_prompts(attention, prompts[:2]).detach()
    dense = target_states(models[0], prompts[:2])
    torch.testing.assert_close(decoded, dense, rtol=1e-3, atol=1e-3)


def test_dense_greedy_text_is_the_decoders(models, prompts, runs):
    dense = continue_text(models[0], prompts, 12)[:, prompts.shape[1] :]
    assert tuple(map(tuple, dense.tolist())) == tuple(
        row[:12] for row in runs[0].tokens
    )


def test_sampling_touches_odd_rows_only(models, prompts):
    torch.manual_seed(3)
    drawn = continue_text(models[0], prompts[:2], 12, sampled=12)
    greedy = continue_text(models[0], prompts[:2], 12)
    assert torch.equal(drawn[0], greedy[0])
    assert not torch.equal(drawn[1], greedy[1])


@pytest.mark.parametrize("mask", list(Mask))
def test_drafts_are_those_of_dense_attention_under_the_same_mask(
    models, generator, prompts, mask
):
    drafts = {m: draft(generator, prompts, m) for m in Mask}
    target, drafter = models
    tokens = prompts[:, :65]
    anchors = torch.full((len(prompts), 1), 64)
    dense = draft_logits(
        drafter,
        target.embedding.weight,
        target_states(target, tokens),
        tokens,
        anchors,
        causal=mask is Mask.CAUSAL,
    )
    assert torch.equal(drafts[mask], dense[:, 0].argmax(-1))
    assert not torch.equal(drafts[Mask.CAUSAL], drafts[Mask.NON_CAUSAL])


def draft(generator, prompts, mask):
    """Draft after the first 64 tokens of each prompt."""
    attention = LatentAttention(generator.target_group, generator.serving)
    drafting = LatentAttention(
        replace(generator.drafter_group, mask=mask), generator.serving
    )
    requests = range(len(prompts))
    with torch.no_grad():
        states = generator._read_prompts(attention, prompts[:, :64])
        generator._absorb(drafting, requests, [64] * len(prompts), states)
        drafts = generator.draft(drafting, requests, prompts[:, 64])
    assert {drafting.cache.seq_len(request) for request in requests} == {64}
    return drafts


def test_a_backend_without_fp32_decodes_in_bf16(models, serving, prompts, monkeypatch):
    def refuses_fp32(problem, *args):
        if problem.q_dtype == "fp32":
            return Survey(selection=None, refused={})
        return survey(problem, *args)

    monkeypatch.setattr(attention_module, "survey", refuses_fp32)
    generator = Generator(*models, serving, draft_len=6, num_reqs=2)
    assert generator.serving.dtype == "bf16"
    speculative = generator.speculative(prompts[:2], 8)
    assert {len(row) for row in speculative.tokens} == {8}
