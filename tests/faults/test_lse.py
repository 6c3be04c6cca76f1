"""Faults of the log-sum-exp: its base, its layout, and who writes it when."""

import math

import pytest
import torch
from fault_steps import (
    CPU,
    HOPPER,
    HOPPER_FP8,
    SERVERS,
    Step,
    amd,
    decoder_of,
    narrow,
    problem_of,
    refusals,
    serve,
)

from mla_decode import ArgumentError
from mla_decode.dcp import merge_partials
from mla_decode_contract.mutants import MUTANTS
from mla_decode_contract.outcome import Outcome
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target
from mla_decode_rocm_aiter import backend as aiter_backend
from mla_decode_rocm_aiter.simulator import simulated


def merged(*outputs):
    """Partial outputs of disjoint keys as one."""
    outs, lses = zip(*outputs, strict=True)
    return merge_partials(torch.stack(outs).float(), torch.stack(lses))


@pytest.mark.fault("LSE-01")
def test_parts_are_merged_by_natural_weights():
    outs = torch.tensor([0.0, 10.0]).view(2, 1, 1, 1)
    lses = torch.tensor([2.0, 8.0]).log().view(2, 1, 1)
    out, lse = merge_partials(outs, lses)
    assert out.item() == pytest.approx(8.0, abs=1e-5)
    assert lse.item() == pytest.approx(math.log(10.0), abs=1e-6)
    mistaken, _ = merge_partials(outs, lses * math.log(2.0))
    assert mistaken.item() == pytest.approx(7.2330317, abs=1e-5)


@pytest.mark.fault("LSE-01")
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_parts_in_any_number_are_the_whole(parts):
    generator = torch.Generator().manual_seed(parts)
    scores = torch.randn(parts, 5, 3, 40, generator=generator) * 9
    values = torch.randn(parts, 40, 512, generator=generator)
    outs = torch.einsum("rthk,rkc->rthc", scores.softmax(-1), values)
    out, lse = merge_partials(outs, scores.logsumexp(-1))
    joined = scores.permute(1, 2, 0, 3).flatten(2)
    torch.testing.assert_close(lse, joined.logsumexp(-1))
    whole = torch.einsum("thk,kc->thc", joined.softmax(-1), values.flatten(0, 1))
    torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.fault("LSE-02")
def test_the_kit_says_that_log2_was_returned():
    mutant = MUTANTS["lse_log2"]
    target = Target(backend="reference", device=CPU, mutant=mutant.name)
    found = run_case("lse.natural_log", mutant.apply(narrow()), target)
    assert found.outcome is Outcome.FAILED
    assert "log2 returned" in found.failure.message
    negated = MUTANTS["lse_negated"].apply(narrow())
    other = run_case("lse.natural_log", negated, target)
    assert "log2" not in other.failure.message


@pytest.mark.fault("LSE-02", "LSE-03", "LSE-04")
@pytest.mark.parametrize("name", SERVERS)
def test_a_long_request_beside_a_short_one_merges_to_the_whole(name, fault_id):
    interpreted = name == "interpreted Triton"
    prefix = 256 if interpreted else 4096 if fault_id == "LSE-03" else 512
    suffix = 64
    problem = problem_of(2, needs_lse=True, max_model_len=prefix + 2 * suffix)
    decoder = decoder_of(problem, SERVERS[name])
    whole = Step(problem, decoder.device, [prefix + suffix, suffix])
    found = whole.run(decoder)
    whole.check(found)  # the short one is one split, the long one many
    if fault_id != "LSE-03":
        return
    table = whole.common.block_table_tensor
    first = whole.with_lens([prefix, suffix]).run(decoder)
    rest = torch.cat((table[:1, prefix // 64 :], table[1:, :3]))
    second = whole.with_lens([suffix] * 2).changed(block_table_tensor=rest)
    second = second.run(decoder)
    out, lse = merged((first.out[:1], first.lse[:1]), (second.out[:1], second.lse[:1]))
    assert (out - found.out[:1].float()).abs().max() < 2e-3
    torch.testing.assert_close(lse, found.lse[:1], rtol=0, atol=1e-3)


DTYPES = {
    "reference": (("reference", CPU), ("bf16 bf16", "bf16 fp8", "fp8 fp8")),
    "gfx950": (("rocm_aiter", amd()), ("bf16 bf16", "fp8 fp8")),
    "gfx942": (("rocm_aiter", amd("gfx942")), ("bf16 bf16",)),
    "FlashMLA": (("cuda_flashmla", HOPPER), ("bf16 bf16",)),
    "Triton": (SERVERS["interpreted Triton"], ("bf16 bf16", "bf16 fp8")),
}
"""What serves a block of eight tokens with LSE and without."""


@pytest.mark.fault("LSE-06", "LSE-07")
@pytest.mark.parametrize("name", DTYPES)
def test_out_is_the_same_with_lse_and_without(name):
    server, pairs = DTYPES[name]
    for dtypes in pairs:
        found = [
            serve(problem_of(16, 8, dtypes=dtypes, needs_lse=asked), server, [70, 9])
            for asked in (False, True)
        ]
        without, asked = (output for _, _, output in found)
        assert without.lse is None
        torch.testing.assert_close(without.out, asked.out, rtol=0.01, atol=0.01)
        decoder, step, _ = found[0]
        with pytest.raises(ArgumentError, match="does not ask for it") as caught:
            step.run(decoder, lse=torch.empty(16, 16))
        assert "needs_lse=True" in caught.value.fix


@pytest.mark.fault("LSE-07")
def test_fp8_of_flashmla_without_lse_is_right_and_with_it_refused():
    server = ("cuda_flashmla", HOPPER_FP8)
    serve(problem_of(16, 8, dtypes="fp8 fp8"), server, [70, 9])
    problem = problem_of(16, 8, dtypes="fp8 fp8", needs_lse=True)
    (reason,) = refusals(problem, server)
    assert str(reason.code) == "lse"


@pytest.mark.fault("LSE-06")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_128_heads_in_fp8_ask_aiter_for_an_lse_where_one_is_needed(arch, monkeypatch):
    lens = [1 + at % 3 for at in range(32)]
    with simulated(arch):
        decode = __import__("aiter.mla").mla.mla_decode_fwd
        asked = []

        def watched(*args, return_lse=False, causal=True, **kwargs):
            asked.append(return_lse)
            return decode(*args, return_lse=return_lse, causal=causal, **kwargs)

        monkeypatch.setattr("aiter.mla.mla_decode_fwd", watched)
        for needs_lse in (False, True):
            problem = problem_of(
                128, dtypes="fp8 fp8", needs_lse=needs_lse, max_num_reqs=32
            )
            serve(problem, ("rocm_aiter", amd(arch)), lens)
    assert asked == [False, True]


@pytest.mark.fault("LSE-09")
@pytest.mark.parametrize("name", SERVERS)
def test_the_layout_is_rows_by_heads(name):
    problem = problem_of(3, 2, needs_lse=True)
    _, step, found = serve(problem, SERVERS[name], [9, 70])
    assert found.lse.shape == (4, 3)
    right = step.truth()[1].float()
    distances = (right.flatten()[:, None] - right.flatten()).abs() + torch.eye(12)
    assert distances.min() > 1e-3  # each belongs to one place
    assert torch.equal(
        (found.lse.flatten()[:, None] - right.flatten()).abs().argmin(1),
        torch.arange(12),
    )


@pytest.mark.fault("LSE-10")
def test_gfx942_takes_the_way_that_has_an_lse_or_refuses():
    server = ("rocm_aiter", amd("gfx942"))
    scheduled = []
    for dtypes in ("bf16 bf16", "fp8 fp8", "bf16 fp8"):
        for heads in (1, 12, 16, 32, 64, 128):
            for q in (1, 2, 4):
                problem = problem_of(heads, q, dtypes=dtypes, needs_lse=True)
                reasons = aiter_backend.refusals(problem, server[1])
                if reasons:
                    assert {str(reason.code) for reason in reasons} <= {
                        "lse",
                        "query_len",
                    }
                    continue
                decoder, step, _ = serve(problem, server, [9, 70])
                if decoder.plan(step.common).schedule is not None:
                    scheduled.append((dtypes, heads, q))
    assert scheduled == [("fp8 fp8", 64, 1)]
    decoder, step, _ = serve(problem_of(16, needs_lse=True), server, [9, 70])
    assert decoder.plan(step.common).schedule is None
