"""What a decoder says of its last step, and what saying it costs."""

import json
from dataclasses import replace

import pytest

from mla_decode import (
    Candidate,
    Capability,
    DecodeProblem,
    DeviceInfo,
    Mask,
    MLADecoder,
    StepFacts,
)
from mla_decode.metadata import DecodeMetadata


def candidates(*backends):
    return {b.name: Candidate(name=b.name, backend=b) for b in backends}


def test_a_native_step_in_words_and_as_data(make_step):
    step = make_step(seq_lens=(9, 9), query_len=2, causal=False)
    decoder = MLADecoder(step.problem, device="cpu")
    decoder.plan(step.common)
    report = decoder.report()
    assert report.downgrades == ()
    assert (report.kernel_num_q_heads, report.kernel_query_len) == (2, 2)
    assert (report.path, report.max_splits, report.kernels) == ("torch", 1, ())
    printed = json.loads(json.dumps(report.as_dict()))
    assert printed["workspace"]["total"] == report.workspace_bytes
    assert printed["lowering"]["kind"] == "native"
    lines = str(report).splitlines()
    assert lines[0] == "reference (reference)"
    assert "2 requests, Q=2, non_causal" in lines[1]
    assert "not named (2 heads x 2 tokens, torch)" in lines[2]
    assert "1 at most" in lines[3]
    assert "the same bits twice" in str(report)
    assert "downgrade" not in str(report)


def test_a_ragged_step_says_so(make_step):
    step = make_step(seq_lens=(9, 9), query_lens=[1, 2])
    decoder = MLADecoder(step.problem, device="cpu")
    decoder.plan(step.common)
    assert "ragged blocks" in str(decoder.report())
    assert "(2 heads, torch)" in str(decoder.report())


def test_bits_that_hang_on_no_batch_are_said(make_step):
    step = make_step(batch_invariant=True)
    decoder = MLADecoder(step.problem, device="cpu")
    decoder.plan(step.common)
    assert "the same bits whatever the batch" in str(decoder.report())


def test_a_backend_that_says_nothing_more_is_reported_as_core_knows_it(
    plain_backend_cls, make_step, cpu
):
    step = make_step()
    loose = type("Loose", (plain_backend_cls,), {"deterministic": False})()
    decoder = MLADecoder(
        step.problem, "plain", device=cpu, candidates=candidates(loose)
    )
    decoder.plan(step.common)
    report = decoder.report()
    assert (report.kernels, report.path, report.max_splits) == ((), "", None)
    assert "splits" not in str(report)
    assert "bits may differ" in str(report)
    assert DecodeMetadata.facts(
        replace_builder(decoder.plan(step.common), None)
    ) == StepFacts(num_q_heads=0, query_len=1)


def replace_builder(metadata, builder):
    metadata.builder = builder
    return metadata


def test_who_refused_before_stands_in_the_report_with_every_reason(
    plain_backend_cls, make_step
):
    first = type("First", (plain_backend_cls,), {"name": "triton_mla"})()
    first.capability = Capability(rows=())
    known = candidates(first, plain_backend_cls())
    step = make_step()
    decoder = MLADecoder(
        step.problem, device=DeviceInfo.assume("sm_90"), candidates=known
    )
    decoder.plan(step.common)
    report = decoder.report()
    (downgrade,) = report.downgrades
    assert (downgrade.wanted, downgrade.taken) == ("triton_mla", "plain")
    assert downgrade.reasons == tuple(
        str(reason) for reason in decoder.selection.refused["triton_mla"]
    )
    assert "plain instead of triton_mla: [arch]" in str(report)
    assert report.refused == {"triton_mla": ("arch",)}


def test_a_rewrite_shows_what_the_kernel_gets_and_why(
    plain_backend_cls, make_step, cpu
):
    backend = plain_backend_cls()
    (row,) = (r for r in backend.capability.rows if r.arch == "cpu")
    backend.capability = Capability(
        rows=(replace(row, query_lens={Mask.CAUSAL: range(1, 2)}),)
    )
    step = make_step(seq_lens=(9,), query_len=4, causal=False, heads=2)
    problem = replace(step.problem, masks={Mask.NON_CAUSAL})
    decoder = MLADecoder(
        problem, "plain", "exact", device=cpu, candidates=candidates(backend)
    )
    decoder.plan(step.common)
    report = decoder.report()
    assert (report.num_q_heads, report.query_len) == (2, 4)
    assert (report.kernel_num_q_heads, report.kernel_query_len) == (8, 1)
    (downgrade,) = report.downgrades
    assert downgrade.taken == "an exact fold"
    assert downgrade.reasons[0].startswith("[mask]")


def test_a_backends_own_way_round_is_a_downgrade(
    plain_backend, make_step, cpu, monkeypatch
):
    step = make_step()
    decoder = MLADecoder(
        step.problem, "plain", device=cpu, candidates=candidates(plain_backend)
    )
    said = StepFacts(
        kernels=("fast", "merge"),
        path="the slow way",
        num_q_heads=16,
        query_len=1,
        downgrades=("no table for 2 heads",),
    )
    metadata = decoder.plan(step.common)
    monkeypatch.setattr(type(metadata), "facts", lambda _: said)
    report = decoder.report()
    assert "fast + merge (16 heads x 1 tokens, the slow way)" in str(report)
    assert "the slow way instead of its usual path: no table for 2 heads" in str(report)


def test_planning_and_running_keep_a_reference_and_make_no_report(
    make_step, monkeypatch
):
    import mla_decode.decoder as module

    made = []
    monkeypatch.setattr(module, "report_step", lambda *a: made.append(a))
    step = make_step()
    decoder = MLADecoder(step.problem, device="cpu")
    metadata = decoder.plan(step.common)
    monkeypatch.setattr(type(metadata), "facts", made.append)
    decoder.run(step.q, step.kv_cache, metadata, **step.arguments)
    assert made == []
    assert decoder._last is metadata
    decoder.report()
    assert len(made) == 1
    assert made[0][0] is metadata


def test_problems_of_two_groups_report_apart(make_step):
    """A target and its drafter: other masks, other blocks, in one process."""
    verify = make_step(seq_lens=(9,), query_len=2)
    draft = make_step(seq_lens=(9,), query_len=3, causal=False)
    decoders = [MLADecoder(step.problem, device="cpu") for step in (verify, draft)]
    for decoder, step in zip(decoders, (verify, draft), strict=True):
        decoder.plan(step.common)
    assert [d.report().mask for d in decoders] == ["causal", "non_causal"]
    assert [d.report().query_len for d in decoders] == [2, 3]


@pytest.mark.parametrize("cap", [0, -1, 2.0, True])
def test_a_split_cap_is_a_positive_number(cap):
    with pytest.raises(ValueError, match="max_splits"):
        DecodeProblem(num_q_heads=1, max_splits=cap)
