"""Faults of non-causal draft blocks: masked all the same, or not computed at all."""

import inspect

import pytest
import torch
from fault_steps import (
    CPU,
    SERVERS,
    Step,
    amd,
    candidate,
    codes,
    decoder_of,
    narrow,
    problem_of,
    serve,
)

from mla_decode import BackendRefused, Dcp, MLADecoder, OutdatedLibraryError
from mla_decode.dcp import local_seq_lens, merge_partials, owned_tokens
from mla_decode_contract.outcome import Outcome
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target
from mla_decode_rocm_aiter.simulator import simulated

DRAFT = {"q": 8, "causal": False}


@pytest.mark.fault("NONCAUSAL-01")
@pytest.mark.parametrize("release", ["0.1.13", "0.1.16.post6", "0.1.19.post2"])
def test_an_aiter_without_the_argument_is_outdated(release):
    with pytest.raises(OutdatedLibraryError) as caught:
        decoder_of(problem_of(**DRAFT), ("rocm_aiter", amd("gfx950", release)))
    assert (caught.value.installed, caught.value.library) == (release, "amd-aiter")
    assert caught.value.first_supported == "0.1.20"
    assert "causal" in str(caught.value)
    gfx942 = ("rocm_aiter", amd("gfx942", release))
    assert codes(problem_of(**DRAFT), gfx942) == {"mask"}


@pytest.mark.fault("NONCAUSAL-01")
def test_the_signature_decides_and_not_the_release(monkeypatch):
    with simulated("gfx950") as machine:
        decode = __import__("aiter.mla").mla.mla_decode_fwd
        before = inspect.signature(decode)
        kept = [p for p in before.parameters.values() if p.name != "causal"]

        def mla_decode_fwd(*args, **kwargs):
            return decode(*args, **kwargs)

        mla_decode_fwd.__signature__ = before.replace(parameters=kept)
        monkeypatch.setattr("aiter.mla.mla_decode_fwd", mla_decode_fwd)
        with pytest.raises(OutdatedLibraryError, match="no parameter `causal`"):
            decoder_of(problem_of(**DRAFT), ("rocm_aiter", amd()))
        assert not machine.launches


@pytest.mark.fault("NONCAUSAL-02")
@pytest.mark.parametrize("name", SERVERS)
def test_every_row_of_a_draft_block_sees_every_key(name):
    problem = problem_of(16, needs_lse=True, **DRAFT)
    lowering = "exact" if name == "simulated FlashMLA" else "refuse"
    _, step, found = serve(
        problem, SERVERS[name], [40], causal=False, lowering=lowering
    )
    causal = step.changed(causal=True)
    out, lse = causal.truth()
    assert (found.out[0].double() - out[0]).abs().max() > 1e-2
    assert (found.lse[0] > lse[0]).all()  # 40 keys weigh more than 33 of them


@pytest.mark.fault("NONCAUSAL-02")
@pytest.mark.parametrize("name", ["reference", "simulated AITER", "interpreted Triton"])
def test_a_draft_block_sees_every_key_over_two_ranks(name):
    whole = Step(problem_of(16, needs_lse=True, **DRAFT), CPU, [40], causal=False)
    used = whole.common.block_table_tensor[0, :1].long()
    keys = whole.kv_cache[used].reshape(-1, 576)[:40]
    parts = []
    for rank in range(2):
        dcp = Dcp(world=2, rank=rank)
        problem = problem_of(16, dcp=dcp, **DRAFT)
        decoder = decoder_of(problem, SERVERS[name])
        step = Step(problem, decoder.device, [40], causal=False)
        page = step.common.block_table_tensor[0, 0]
        local = owned_tokens(40, dcp)
        step.kv_cache[page] = torch.nan
        step.kv_cache[page, : len(local)] = keys[local]
        step.q = whole.q
        lens = local_seq_lens(step.common.seq_lens, dcp)
        parts.append(step.changed(dcp_local_seq_lens=lens).run(decoder))
    out, lse = merge_partials(*(torch.stack(part) for part in zip(*parts, strict=True)))
    right_out, right_lse = whole.truth()
    torch.testing.assert_close(out.double(), right_out, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-3, atol=1e-3)


def stub():
    """A backend that accepts everything and returns without writing."""
    backend = narrow()
    backend.__class__ = type("Stub", (type(backend),), {"_forward": lambda *_: None})
    return backend


@pytest.mark.fault("NONCAUSAL-03")
def test_a_stub_fails_the_kit_and_the_decoders_own_check():
    target = Target(backend="reference", device=CPU)
    for case in ("out.every_row_written", "mask.non_causal.sees_siblings"):
        assert run_case(case, stub(), target).outcome is Outcome.FAILED
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(
            problem_of(16, **DRAFT),
            "reference",
            device=CPU,
            candidates=candidate(stub()),
            check_values=True,
        )
    assert caught.value.codes == {"checker_error"}
    assert "non_causal block of 8 token(s)" in str(caught.value)


@pytest.mark.fault("NONCAUSAL-06")
def test_blocks_without_a_kernel_are_refused_as_the_mask():
    gfx942 = ("rocm_aiter", amd("gfx942"))
    for dtypes in ("bf16 bf16", "bf16 fp8", "fp8 fp8"):
        for heads, q in ((16, 8), (128, 2), (12, 4)):
            problem = problem_of(heads, q, causal=False, dtypes=dtypes)
            assert codes(problem, gfx942) == {"mask"}
    mixed = problem_of(16, 4, causal=False, dtypes="bf16 fp8")
    assert codes(mixed, ("rocm_aiter", amd())) == {"mask"}


@pytest.mark.fault("NONCAUSAL-06")
@pytest.mark.parametrize(
    "server",
    [*SERVERS.values(), ("rocm_aiter", amd("gfx942", "0.1.13"))],
    ids=[*SERVERS, "gfx942"],
)
def test_one_token_is_both_masks_bit_for_bit(server):
    found = [
        serve(problem_of(16, causal=causal), server, [40, 3], causal=causal)[2].out
        for causal in (True, False)
    ]
    assert torch.equal(*found)
