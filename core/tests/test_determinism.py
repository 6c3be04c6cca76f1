"""Equal bits, as a capability: declared, asked for, refused, and given."""

from dataclasses import replace

import pytest
import torch

from mla_decode import (
    BackendRefused,
    Candidate,
    Capability,
    DecodeProblem,
    Feature,
    MLADecoder,
    Support,
    survey,
)

LENS = (1100, 600, 513, 40, 9)


def decode(step, decoder):
    return decoder.run(
        step.q, step.kv_cache, decoder.plan(step.common), **step.arguments
    )


def part(step, *, rows, starts, lens, tables):
    """A batch of some of a step's rows, with other lengths."""
    starts = torch.tensor(starts, dtype=torch.int32)
    lens = torch.tensor(lens, dtype=torch.int32)
    tokens = int(starts[-1])
    changed = step.with_common(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(lens),
        num_actual_tokens=tokens,
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=step.common.block_table_tensor[tables],
    )
    return replace(changed, q=step.q[rows])


@pytest.mark.parametrize("causal", [True, False])
def test_bits_hang_on_no_neighbour_and_on_no_other_token_of_the_block(
    make_step, causal
):
    step = make_step(
        seq_lens=LENS,
        query_len=3,
        causal=causal,
        heads=5,
        out_dtype="fp32",
        max_model_len=1200,
        batch_invariant=True,
    )
    problem = replace(step.problem, query_lens={1, 3})
    decoder = MLADecoder(problem, device="cpu")
    together = decode(step, decoder)
    truth, _ = step.truth()
    assert torch.allclose(together.out.double(), truth, atol=2e-2)
    for request, seq_len in enumerate(LENS):
        first = 3 * request
        alone = part(
            step,
            rows=slice(first, first + 3),
            starts=[0, 3],
            lens=[seq_len],
            tables=[request],
        )
        found = decode(alone, decoder)
        assert torch.equal(found.out, together.out[first : first + 3])
        assert torch.equal(found.lse, together.lse[first : first + 3])
        for token in range(3):
            row = slice(first + token, first + token + 1)
            hidden = 2 - token if causal else 0
            single = part(
                step, rows=row, starts=[0, 1], lens=[seq_len - hidden], tables=[request]
            )
            found = decode(single, decoder)
            assert torch.equal(found.out, together.out[row])
            assert torch.equal(found.lse, together.lse[row])


def test_pads_and_rows_without_a_key_are_empty_under_invariance_too(make_step):
    step = make_step(seq_lens=(2, 9), query_len=2, pads=1, batch_invariant=True)
    output = decode(step, MLADecoder(step.problem, device="cpu"))
    truth, lse = step.truth()
    assert torch.allclose(output.out.double(), truth, atol=2e-2)
    assert output.out[4:].eq(0).all()
    assert torch.equal(output.lse.isinf(), lse.isinf())


def test_ragged_blocks_are_walked_token_by_token_too(make_step):
    step = make_step(seq_lens=(20, 9, 33), query_lens=[3, 1, 2], batch_invariant=True)
    output = decode(step, MLADecoder(step.problem, device="cpu"))
    assert torch.allclose(output.out.double(), step.truth()[0], atol=2e-2)


def known_as(backend):
    return {backend.name: Candidate(name=backend.name, backend=backend)}


def test_a_backend_that_does_not_repeat_its_bits_is_refused_where_they_must(
    plain_backend_cls, make_step, cpu
):
    backend = type("Loose", (plain_backend_cls,), {"deterministic": False})()
    problem = make_step().problem
    assert survey(problem, cpu, "plain", candidates=known_as(backend)).selection
    asked = replace(problem, deterministic=True)
    for lowering in ("refuse", "exact"):
        with pytest.raises(BackendRefused) as caught:
            MLADecoder(
                asked, "plain", lowering, device=cpu, candidates=known_as(backend)
            )
        assert "determinism" in caught.value.codes
        assert "the same bits twice" in str(caught.value)


def test_invariance_is_refused_where_no_row_declares_it(plain_backend, make_step, cpu):
    problem = replace(make_step().problem, batch_invariant=True)
    known = known_as(plain_backend)
    for lowering in ("refuse", "exact"):
        with pytest.raises(BackendRefused) as caught:
            MLADecoder(problem, "plain", lowering, device=cpu, candidates=known)
        (reason,) = caught.value.refusals
        assert (reason.code, reason.got) == ("determinism", "batch_invariance")


def test_no_rewrite_serves_a_problem_whose_bits_may_not_hang_on_the_block(
    plain_backend_cls, make_step, cpu
):
    """Each block length may become a problem of its own, and its kernel another."""
    step = make_step(query_len=2, causal=False, seq_lens=(9,))
    backend = plain_backend_cls()
    (row,) = (r for r in backend.capability.rows if r.arch == "cpu")
    features = {**row.features, Feature.BATCH_INVARIANCE: Support.YES}
    backend.capability = Capability(
        rows=(replace(row, features=features, query_lens={}),)
    )
    problem = replace(step.problem, batch_invariant=True)
    found = survey(problem, cpu, "plain", "exact", candidates=known_as(backend))
    assert found.selection is None


def test_what_is_asked_of_bits_is_part_of_the_problem():
    plain = DecodeProblem(num_q_heads=1)
    asked = DecodeProblem(num_q_heads=1, batch_invariant=True)
    assert (plain.deterministic, plain.batch_invariant) == (False, False)
    assert (asked.deterministic, asked.batch_invariant) == (True, True)
    assert plain != asked
