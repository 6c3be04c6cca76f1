"""Who decodes: what was asked for, or an error; what was passed over, and why."""

import logging

import pytest
from fault_steps import (
    HOPPER,
    SERVERS,
    Step,
    amd,
    decoder_of,
    problem_of,
    refusals,
)

from mla_decode import (
    BackendRefused,
    DeviceInfo,
    MLADecoder,
    OutdatedLibraryError,
    discover,
    select,
    survey,
)
from mla_decode.selection import AUTO_ORDER


def draft(**words):
    return problem_of(16, 4, causal=False, **words)


@pytest.mark.fault("SELECT-01")
@pytest.mark.parametrize(
    ("name", "device", "problem", "better"),
    [
        ("triton_mla", amd(), problem_of(dtypes="fp8 fp8"), "rocm_aiter"),
        ("cuda_flashmla", HOPPER, draft(), "triton_mla"),
        ("rocm_aiter", amd("gfx942"), draft(), "triton_mla"),
    ],
)
def test_a_named_backend_is_honoured_or_refused_alone(name, device, problem, better):
    with pytest.raises(BackendRefused) as caught:
        MLADecoder(problem, name, device=device)
    assert set(caught.value.refused) == {name}
    assert all(reason.fix for reason in caught.value.refusals)
    found = select(problem, device)
    assert found.backend.name == better


@pytest.mark.fault("SELECT-02")
def test_auto_keeps_and_logs_every_reason_of_who_was_better(caplog):
    device, problem = amd("gfx942"), draft()
    with caplog.at_level(logging.WARNING, logger="mla_decode"):
        decoder = MLADecoder(problem, device=device)
    assert decoder.backend.name == "triton_mla"
    asked = discover()["rocm_aiter"].backend.refusals(problem, device)
    assert list(decoder.selection.refused["rocm_aiter"]) == asked != []
    (line,) = [r.getMessage() for r in caplog.records if r.name == "mla_decode"]
    assert "triton_mla decodes" in line
    assert "{'rocm_aiter': ['mask']}" in line
    step = Step(problem, device, [9], causal=False)
    decoder.plan(step.common)
    (downgrade,) = decoder.report().downgrades
    assert (downgrade.wanted, downgrade.taken) == ("rocm_aiter", "triton_mla")
    assert downgrade.reasons == tuple(map(str, asked))


@pytest.mark.fault("SELECT-02")
def test_auto_does_not_slide_past_a_library_that_is_only_too_old():
    with pytest.raises(OutdatedLibraryError) as caught:
        MLADecoder(draft(), device=amd(release="0.1.19.post2"))
    assert "name another backend explicitly" in caught.value.fix


@pytest.mark.fault("SELECT-03")
@pytest.mark.parametrize("name", ["triton_mla", "rocm_aiter"])
def test_the_argument_decides_and_not_the_environment(name, monkeypatch):
    other = {"triton_mla": "rocm_aiter", "rocm_aiter": "triton_mla"}[name]
    for variable in ("MLA_DECODE_BACKEND", "MLA_DECODE_VLLM", "VLLM_ATTENTION_BACKEND"):
        monkeypatch.setenv(variable, other)
    monkeypatch.setenv("MLA_DECODE_SIMULATE", "rocm_aiter:gfx950:0.1.16.post6")
    for switch in ("VLLM_ROCM_USE_AITER", "AITER_ENABLE_EXPERIMENTAL"):
        monkeypatch.setenv(switch, "1")
    decoder = MLADecoder(problem_of(), name, device=amd())
    assert decoder.backend.name == name


@pytest.mark.fault("SELECT-03")
@pytest.mark.parametrize(
    "variable", ["AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_USE_OPUS"]
)
def test_a_variable_that_moves_the_chosen_library_is_refused_by_name(
    variable, monkeypatch
):
    problem = draft(dtypes="fp8 fp8")  # the schedule alone carries its mask
    decoder_of(problem, SERVERS["simulated AITER"])
    monkeypatch.setenv(variable, "1")
    (reason,) = refusals(problem, SERVERS["simulated AITER"])
    assert variable in reason.got
    assert reason.fix == f"unset {variable}"


@pytest.mark.fault("SELECT-04")
@pytest.mark.parametrize("server", SERVERS)
def test_every_page_size_is_served_as_declared_or_refused(server):
    name, device = SERVERS[server]
    row = discover()[name].backend.capability.row(device.arch)
    for size in (*range(1, 35), 63, 64, 65, 128, 129, 480, 512, 65_537, 1 << 21):
        problem = problem_of(page_size=size, max_num_reqs=1, max_model_len=64)
        found = survey(problem, device, name)
        if size in row.page_sizes:
            assert found.selection is not None, size
        else:
            codes = [str(reason.code) for reason in found.refused[name]]
            assert "page_size" in codes, size


@pytest.mark.fault("SELECT-06")
@pytest.mark.parametrize("requests", [31, 32, 33])
def test_the_schedule_that_was_built_is_the_one_that_runs(requests):
    problem = problem_of(max_num_reqs=64)
    decoder = decoder_of(problem, SERVERS["simulated AITER"])
    step = Step(problem, decoder.device, [7] * requests)
    plan = decoder.plan(step.common)
    assert plan.route.keeps_schedule
    step.check(step.run(decoder, plan))
    (launch,) = decoder.builder.library.machine.launches
    assert launch.key == plan.route.key
    report = decoder.report()
    assert report.kernels == (launch.kernel,)
    assert report.path == "a persistent schedule"
    assert report.downgrades == ()


@pytest.mark.fault("SELECT-07")
def test_target_and_drafter_have_backends_and_pages_of_their_own():
    target = problem_of(16, 5, page_size=64)
    drafter = problem_of(8, 4, causal=False, page_size=16)
    roles = [
        (target, decoder_of(target, SERVERS["simulated FlashMLA"]), True),
        (drafter, decoder_of(drafter, SERVERS["reference"]), False),
        (drafter, decoder_of(drafter, SERVERS["simulated AITER"]), False),
    ]
    plans = []
    for problem, decoder, causal in roles:
        step = Step(problem, decoder.device, [70, 9], causal=causal)
        plans.append((step, decoder, decoder.plan(step.common)))
    for step, decoder, plan in reversed(plans):
        step.check(step.run(decoder, plan))
    names = [decoder.report().backend for _, decoder, _ in roles]
    assert names == ["cuda_flashmla", "reference", "rocm_aiter"]
    masks = [decoder.report().mask for _, decoder, _ in roles]
    assert masks == ["causal", "non_causal", "non_causal"]


@pytest.mark.fault("SELECT-08")
@pytest.mark.parametrize("arch", ["gfx90a", "sm_80", "sm_86"])
def test_the_reference_serves_a_card_without_kernels_when_named(arch):
    device = DeviceInfo.assume(arch)
    problem = draft(max_num_reqs=2)
    decoder = MLADecoder(problem, "reference", device=device)
    step = Step(problem, device, [9, 4], causal=False)
    step.check(step.run(decoder))
    assert decoder.report().backend == "reference"
    assert decoder.report().evidence == "reference"


@pytest.mark.fault("SELECT-08")
@pytest.mark.parametrize("arch", ["gfx1100", "gfx90a", "sm_75", "sm_120"])
def test_auto_never_takes_the_reference_on_a_gpu(arch):
    device = DeviceInfo.assume(arch)
    found = survey(problem_of(), device)
    assert "reference" not in found.refused
    if found.selection is None:
        with pytest.raises(BackendRefused) as caught:
            select(problem_of(), device)
        order = AUTO_ORDER.get(arch) or AUTO_ORDER[device.vendor]
        assert set(order) <= set(caught.value.refused)
    else:
        assert found.selection.backend.name != "reference"
