"""What can be served is known before anything is called, field by field."""

from types import SimpleNamespace

import pytest
import torch
from fault_steps import (
    CPU,
    HOPPER,
    SCALE,
    SERVERS,
    Step,
    amd,
    codes,
    decoder_of,
    problem_of,
    refusals,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import (
    DecodeOutput,
    DeviceInfo,
    StaleMetadataError,
    detect_device,
    discover,
    survey,
)
from mla_decode.reference import ReferenceBackend
from mla_decode_contract.mutants import MUTANTS
from mla_decode_contract.outcome import FailureKind, Outcome
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target
from mla_decode_cuda_flashmla.limits import H200_SMS
from mla_decode_cuda_flashmla.simulator import (
    ProcessExit,
    launches,
    ops,
    raising_exits,
)
from mla_decode_rocm_aiter.probe import ProbeShape, probe_shapes

AITER = "rocm_aiter"


@pytest.mark.fault("CAPS-01")
@settings(max_examples=12)
@given(
    heads=st.integers(1, 140),
    query_len=st.integers(1, 12),
    causal=st.booleans(),
    dtypes=st.sampled_from(["bf16 bf16", "fp8 fp8", "bf16 fp8", "fp16 fp16"]),
    arch=st.sampled_from(["gfx942", "gfx950"]),
    needs_lse=st.booleans(),
)
def test_what_aiter_is_asked_for_has_a_kernel(
    heads, query_len, causal, dtypes, arch, needs_lse
):
    device = amd(arch)
    problem = problem_of(
        heads, query_len, causal=causal, dtypes=dtypes, needs_lse=needs_lse
    )
    found = survey(problem, device, AITER)
    if found.selection is None:
        reasons = found.refused[AITER]
        assert reasons
        assert all(r.got and r.allowed and r.fix for r in reasons)
        return
    decoder = decoder_of(problem, (AITER, device))
    step = Step(problem, device, [query_len + 9, query_len], causal=causal)
    step.check(step.run(decoder))  # a miss would raise SimulatedAbort
    assert decoder.builder.library.machine.launches


@pytest.mark.fault("CAPS-01")
def test_a_call_that_aborts_costs_a_child_and_is_named_by_its_signal():
    shape = ProbeShape(
        heads=16, q=2, q_dtype="fp8", kv_dtype="fp8", causal=False, lse=False
    )
    asked = {"arch": "gfx950", "release": "0.1.20.post1"}
    (found,) = probe_shapes([shape], simulated=asked, timeout_s=120)
    assert found.outcome == "dies"
    assert "SIGABRT" in found.detail
    problem = problem_of(16, 2, causal=False, dtypes="fp8 fp8")
    assert codes(problem, (AITER, amd())) == {"query_len"}


@pytest.mark.fault("CAPS-03")
@pytest.mark.parametrize("server", ["simulated AITER", "simulated FlashMLA"])
def test_a_refusal_names_the_fields_that_do_not_fit_and_no_other(server):
    name, device = SERVERS[server]
    many = 129 if server == "simulated AITER" else 9000
    size = 65_537 if server == "simulated AITER" else 32
    for fields, expected in (
        ({"heads": many}, {"num_heads": str(many)}),
        ({"page_size": size}, {"page_size": str(size)}),
        (
            {"heads": many, "page_size": size},
            {"num_heads": str(many), "page_size": str(size)},
        ),
    ):
        problem = problem_of(**fields)
        asked = survey(problem, device, name).refused[name]
        assert tuple(refusals(problem, SERVERS[server])) == asked
        assert {str(reason.code): reason.got for reason in asked} == expected
        row = discover()[name].backend.capability.row(device.arch)
        for reason in asked:
            allowed = row.page_sizes if reason.code == "page_size" else row.num_q_heads
            assert str(max(allowed)) in reason.allowed


@pytest.mark.fault("CAPS-04")
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1030", "gfx90a", "sm_90", "cpu"])
def test_another_card_is_refused_before_the_library_is_looked_for(
    arch, tmp_path, monkeypatch
):
    (tmp_path / "aiter").mkdir()
    for name in ("__init__.py", "mla.py"):
        (tmp_path / "aiter" / name).write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    device = DeviceInfo(vendor=DeviceInfo.assume(arch).vendor, arch=arch)
    asked = survey(problem_of(), device, AITER).refused[AITER]
    assert [str(reason.code) for reason in asked] == ["arch"]
    assert asked[0].got == arch
    assert "gfx942 gfx950" in asked[0].allowed


NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")


@pytest.mark.fault("CAPS-05")
@pytest.mark.parametrize("arch", NVIDIA)
def test_dense_decode_of_flashmla_is_hoppers_alone(arch):
    server = ("cuda_flashmla", DeviceInfo.assume(arch))
    if arch == "sm_90":
        decoder_of(problem_of(), server)
        return
    (reason,) = refusals(problem_of(), server)
    assert (str(reason.code), reason.got, reason.allowed) == ("arch", arch, "sm_90")


@pytest.mark.fault("CAPS-06")
@pytest.mark.parametrize("server", SERVERS)
def test_another_width_than_576_is_refused_before_a_kernel(server):
    problem = problem_of()
    decoder = decoder_of(problem, SERVERS[server])
    step = Step(problem, decoder.device, [9, 4])
    plan = decoder.plan(step.common)
    nope, rope = step.q[..., :512], step.q[..., 512:]
    for q in (nope, (nope, rope[..., :0]), (nope, rope, rope)):
        with pytest.raises(StaleMetadataError) as caught:
            step.run(decoder, plan, q=q)
        assert caught.value.fix
    with pytest.raises(StaleMetadataError, match="576"):
        decoder.run(
            step.q, step.kv_cache[..., :512].contiguous(), plan, softmax_scale=SCALE
        )
    step.check(step.run(decoder, plan))
    step.check(step.run(decoder, plan, q=(nope.contiguous(), rope.contiguous())))


@pytest.mark.fault("CAPS-06")
def test_consumer_blackwell_is_known_before_it_warms_up():
    device = DeviceInfo.assume("sm_120")
    assert codes(problem_of(), ("cuda_flashmla", device)) == {"arch"}
    assert codes(problem_of(), (AITER, device)) == {"arch"}
    answers = [survey(problem_of(), device, name) for name in ("triton_mla", None)]
    for found in answers:
        row = discover()["triton_mla"].backend.capability.row("sm_120")
        assert (found.selection is None) == (row is None)


FIRST = SimpleNamespace(name="L40S", major=8, minor=9, multi_processor_count=142)
SECOND = SimpleNamespace(name="H100", major=9, minor=0, multi_processor_count=114)


@pytest.mark.fault("CAPS-07")
def test_what_is_asked_of_the_second_card_is_answered_by_it(monkeypatch):
    cards = {0: FIRST, 61: SECOND}  # no other test's index: counts are held
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 62)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.get)
    first, second = detect_device("cuda:0"), detect_device("cuda:61")
    assert (first.arch, second.arch, second.index) == ("sm_89", "sm_90", 61)
    flashmla = discover()["cuda_flashmla"].backend
    rows = problem_of(128, 60)  # 120 tiles of 64 rows, 114 multiprocessors
    assert "arch" in {str(r.code) for r in flashmla.refusals(rows, first)}
    on_second = flashmla.refusals(rows, second)
    assert "arch" not in {str(reason.code) for reason in on_second}
    assert any("Q*H <= 7296" in reason.allowed for reason in on_second)  # 64 * 114
    assert flashmla.cost(problem_of(), second) != flashmla.cost(problem_of(), HOPPER)


class CurrentCard:
    """`torch.cuda.device` of two cards, on which a simulated FlashMLA counts its units.

    The tensors' card, a CPU's here, is number -1; number 0 is current at first.
    """

    number = 0
    units = {0: 78, -1: H200_SMS}  # noqa: RUF012 - never written

    def __init__(self, device):
        self.to, self.back = -1 if device.index is None else device.index, None

    def __enter__(self):
        self.back, CurrentCard.number = CurrentCard.number, self.to
        launches.H200_SMS = CurrentCard.units[self.to]

    def __exit__(self, *_):
        CurrentCard.number = self.back
        launches.H200_SMS = CurrentCard.units[self.back]


@pytest.mark.fault("CAPS-07")
@pytest.mark.parametrize("release", ["2026.4", "2025.4"])
def test_a_library_that_asks_the_current_card_is_asked_on_the_tensors_own(
    release, monkeypatch
):
    device = DeviceInfo.assume("sm_90", libraries={"flash-mla": release})
    decoder = decoder_of(problem_of(), ("cuda_flashmla", device))
    decoder.builder.guards_device = True
    planned, plan = [], ops.plan
    monkeypatch.setattr(launches, "H200_SMS", CurrentCard.units[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CurrentCard.number)
    monkeypatch.setattr(torch.cuda, "device", CurrentCard)
    monkeypatch.setattr(
        ops, "plan", lambda lens, *rest: (planned.append(rest[0]), plan(lens, *rest))[1]
    )
    step = Step(decoder.problem, device, [100, 9])
    for _ in range(2):  # two steps, each of two layers
        metadata = decoder.plan(step.common)
        for _ in range(2):
            step.check(step.run(decoder, metadata))
            assert CurrentCard.number == 0
    assert planned == [H200_SMS, H200_SMS]


@pytest.mark.fault("CAPS-07")
@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("name", ["triton_mla", "cuda_flashmla"])
def test_tensors_on_the_second_gpu_get_a_schedule_of_its_own(name):
    problem = problem_of()
    device = detect_device("cuda:1")
    if survey(problem, device, name).selection is None:
        pytest.skip(f"{name} does not serve this machine")
    step = Step(problem, CPU, [100, 9])
    decoder = decoder_of(problem, (name, device))
    common = step.common
    on_gpu = step.changed(
        query_start_loc=common.query_start_loc.to("cuda:1"),
        seq_lens=common.seq_lens.to("cuda:1"),
        block_table_tensor=common.block_table_tensor.to("cuda:1"),
    )
    with torch.cuda.device(0):
        found = decoder.run(
            step.q.to("cuda:1"),
            step.kv_cache.to("cuda:1"),
            decoder.plan(on_gpu.common),
            softmax_scale=SCALE,
        )
        assert torch.cuda.current_device() == 0
    step.check(DecodeOutput(found.out.cpu(), None))


@pytest.mark.fault("CAPS-08")
@pytest.mark.parametrize(
    ("release", "plan"),
    [
        ("2026.4", launches.plan_sched_meta),
        ("2025.4", launches.plan_tile_metadata),
    ],
)
def test_the_first_batch_that_ends_the_process_is_the_first_one_refused(release, plan):
    device = DeviceInfo.assume("sm_90", libraries={"flash-mla": release})
    server = ("cuda_flashmla", device)
    most = {"2026.4": 11_622, "2025.4": 4_095}[release]
    decoder_of(problem_of(max_num_reqs=most), server)
    (reason,) = refusals(problem_of(max_num_reqs=most + 1), server)
    assert str(reason.code) == "feature"
    assert str(most) in reason.allowed
    assert "lower max_num_reqs" in reason.fix
    with raising_exits(), pytest.raises(ProcessExit):
        plan(torch.ones(most + 1, dtype=torch.int32), 16)
    tiles, _ = plan(torch.ones(most, dtype=torch.int32), 16)
    assert tiles.shape[0] > 0


@pytest.mark.fault("CAPS-08")
@settings(max_examples=40)
@given(heads=st.integers(1, 600), query_len=st.integers(1, 600))
def test_more_row_tiles_than_multiprocessors_are_refused(heads, query_len):
    problem = problem_of(heads, query_len)
    found = survey(problem, HOPPER, "cuda_flashmla")
    rows = heads * query_len
    if rows <= 64 * 132:
        assert found.selection is not None
    else:
        asked = {str(reason.code) for reason in found.refused["cuda_flashmla"]}
        assert asked & {"query_len", "num_heads"}


LIMITS = (
    "refuse.page_size_limits",
    "refuse.num_heads_limits",
    "refuse.causal_query_len_limits",
    "refuse.batch_limits",
)


@pytest.mark.fault("CAPS-10")
@pytest.mark.parametrize("server", SERVERS)
def test_the_kit_runs_each_declared_limit_and_one_past_it(server):
    name, device = SERVERS[server]
    backend = discover()[name].backend
    target = Target(backend=name, device=device)
    is_quick = server in {"reference", "simulated FlashMLA"}
    for case in LIMITS if is_quick else LIMITS[:2]:
        result = run_case(case, backend, target)
        assert result.outcome in {Outcome.PASSED, Outcome.REFUSED}, result.failure


@pytest.mark.fault("CAPS-10")
@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        ("refuses_nothing", FailureKind.REFUSAL),
        ("assertion_instead_of_refusal", FailureKind.REFUSAL),
    ],
)
def test_a_backend_that_passes_its_limit_or_asserts_fails_that_case(mutant, kind):
    wrong = MUTANTS[mutant].apply(ReferenceBackend())
    target = Target(backend="reference", device=CPU)
    result = run_case("refuse.undeclared_features", wrong, target)
    assert result.outcome is Outcome.FAILED
    assert result.failure.kind is kind
    assert run_case("empty.one_request", wrong, target).outcome is Outcome.PASSED
