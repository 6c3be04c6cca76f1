import pytest
import torch

from mla_decode import BackendRefused, Candidate, MLADecoder, StaleMetadataError


@pytest.fixture
def only_plain(plain_backend):
    return {"plain": Candidate(name="plain", backend=plain_backend)}


def test_plans_runs_and_reports_a_step(make_step, cpu, only_plain):
    step = make_step(seq_lens=(9, 9), query_len=2, causal=False)
    decoder = MLADecoder(step.problem, "plain", device=cpu, candidates=only_plain)
    assert decoder.report() is None
    plan = decoder.plan(step.common)
    output = decoder.run(step.q, step.kv_cache, plan, softmax_scale=0.1)
    assert output.out.eq(4).all()
    report = decoder.report()
    assert (report.backend, report.evidence, report.mask) == (
        "plain",
        "nowhere",
        "non_causal",
    )
    assert (report.num_reqs, report.query_len, report.refused) == (2, 2, {})
    assert report.lowering["kind"] == "native"


def test_counts_calls_by_mask_and_only_those_that_ran(make_step, cpu, only_plain):
    step = make_step(seq_lens=(9, 9), query_len=2)
    decoder = MLADecoder(step.problem, "plain", device=cpu, candidates=only_plain)
    for causal in (True, False, True):
        plan = decoder.plan(step.with_common(causal=causal).common)
        decoder.run(step.q, step.kv_cache, plan, softmax_scale=0.1)
    with pytest.raises(StaleMetadataError):
        decoder.run(step.q[:1], step.kv_cache, plan, softmax_scale=0.1)
    assert decoder.calls == {"causal": 2, "non_causal": 1}


def test_auto_decodes_on_the_cpu_with_the_reference(make_step):
    step = make_step(seq_lens=(9, 9), query_len=2)
    decoder = MLADecoder(step.problem, device="cpu")
    plan = decoder.plan(step.common)
    output = decoder.run(step.q, step.kv_cache, plan, **step.arguments)
    truth, _ = step.truth()
    assert decoder.report().backend == "reference"
    assert torch.allclose(output.out.double(), truth, atol=2e-2)


def test_every_refusal_happens_at_construction(make_step, cpu, only_plain):
    problem = make_step(page_size=8).problem
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(problem, "plain", device=cpu, candidates=only_plain)
    assert caught.value.codes == {"page_size"}


def test_plans_for_capture(make_step, cpu, only_plain):
    step = make_step(seq_lens=(9, 9), graphs=True, max_model_len=640)
    decoder = MLADecoder(step.problem, "plain", device=cpu, candidates=only_plain)
    assert decoder.plan_for_capture(step.common).max_seq_len == 640
    assert decoder.report().query_len == 1


def test_reports_who_was_asked_first(make_step, only_plain, plain_backend_cls):
    first = type("F", (plain_backend_cls,), {"name": "triton_mla"})()
    first.capability = type(first.capability)(rows=())
    known = {**only_plain, "triton_mla": Candidate(name="triton_mla", backend=first)}
    problem = make_step().problem
    from mla_decode import DeviceInfo

    decoder = MLADecoder(problem, device=DeviceInfo.assume("sm_90"), candidates=known)
    decoder.plan(make_step().common)
    assert decoder.report().refused == {"triton_mla": ("arch",)}
