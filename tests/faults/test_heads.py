"""Faults of head counts: padded, folded, refused, and never half of each."""

import pytest
import torch
from fault_steps import (
    CPU,
    SCALE,
    SERVERS,
    Step,
    amd,
    codes,
    decoder_of,
    narrow,
    problem_of,
    refusals,
    serve,
)

from mla_decode import (
    BackendRefused,
    DeviceInfo,
    Mask,
    RefusalCode,
    StaleMetadataError,
)
from mla_decode_contract.mutants import MUTANTS
from mla_decode_contract.outcome import Outcome
from mla_decode_contract.runner import run_case
from mla_decode_contract.target import Target
from mla_decode_rocm_aiter import AiterMLAHelper, backend
from mla_decode_rocm_aiter.simulator import simulated

ARCHS = ("gfx942", "gfx950")
GROUPS = (16, 32, 64, 80, 128)


@pytest.mark.fault("HEADS-02")
@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_count_is_padded_to_the_next_group_or_refused(arch):
    for heads in range(1, 129):
        cost = backend.cost(problem_of(heads), amd(arch))
        assert cost.rows == -(-heads // 16) * 16
    for heads in (129, 160, 256):
        (reason,) = refusals(problem_of(heads), ("rocm_aiter", amd(arch)))
        assert reason.code is RefusalCode.NUM_HEADS
        assert (reason.got, reason.allowed) == (str(heads), "1..128")
        assert "tensor-parallel" in reason.fix
    serve(problem_of(32), ("rocm_aiter", amd(arch)), [64, 65])


@pytest.mark.fault("HEADS-02")
def test_a_backend_of_two_widths_pads_only_where_it_may():
    server = (narrow(num_q_heads=frozenset({16, 128})), CPU)
    (reason,) = refusals(problem_of(32), server)
    assert (str(reason.code), reason.got, reason.allowed) == (
        "num_heads",
        "32",
        "16, 128",
    )
    assert "pads to 128 heads (4 times the rows)" in reason.fix
    decoder, _, _ = serve(problem_of(32), server, [64, 65], lowering="exact")
    plan = decoder.selection.plan.as_dict()
    assert (plan["kind"], plan["pad_rows"], plan["rows"]) == ("pad", 96, 128)


@pytest.mark.fault("HEADS-03")
@pytest.mark.parametrize("dtypes", ["bf16 bf16", "bf16 fp8", "fp8 fp8"])
def test_a_key_is_looked_up_after_padding(dtypes):
    for heads in (1, 5, 12, 17, 40, 100):
        padded = AiterMLAHelper.get_actual_mla_num_heads(heads)
        for q in range(1, 9):
            for causal in (True, False):
                asked = [
                    backend.refusals(
                        problem_of(count, q, causal=causal, dtypes=dtypes), amd()
                    )
                    for count in (heads, padded)
                ]
                found, native = ({r.code for r in reasons} for reasons in asked)
                # fewer than 16 heads have one more way: without a schedule
                assert found == native or heads < 16 > len(found - native)
                for reason in asked[0]:
                    assert f"{heads} heads, {padded} after padding" in reason.got


@pytest.mark.fault("HEADS-03")
def test_twelve_heads_over_an_fp8_cache_are_served_or_refused_with_both_counts():
    server = ("rocm_aiter", amd())
    decoder, _, _ = serve(problem_of(12, dtypes="bf16 fp8"), server, [40, 100])
    assert decoder.builder.library.machine.launches[-1].key.persistent
    (reason,) = refusals(problem_of(12, 5, dtypes="bf16 fp8"), server)
    for words in ("bf16 q, fp8 cache", "16 heads", "12 heads", "5 tokens"):
        assert words in reason.got
    assert "lowering='exact'" in reason.fix


@pytest.mark.fault("HEADS-04")
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("heads", [1, 3, 12, 33])
def test_pad_heads_reach_neither_output_nor_lse(name, heads):
    problem = problem_of(heads, needs_lse=True)
    decoder, step, found = serve(problem, SERVERS[name], [3, 70])
    assert found.out.shape == (2, heads, 512)
    assert found.lse.shape == (2, heads)
    if name == "simulated AITER":
        plan = decoder.plan(step.common)
        assert plan.route.heads == decoder.builder.padded_heads == -(-heads // 16) * 16


@pytest.mark.fault("HEADS-05")
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(("planned", "got"), [(8, 16), (16, 8)])
def test_a_query_of_other_heads_than_planned_launches_nothing(name, planned, got):
    decoder = decoder_of(problem_of(planned), SERVERS[name])
    step = Step(problem_of(planned), decoder.device, [64, 65])
    other = Step(problem_of(got), decoder.device, [64, 65])
    out = step.outputs()["out"]
    plan = decoder.plan(step.common)
    with pytest.raises(StaleMetadataError) as caught:
        decoder.run(other.q, step.kv_cache, plan, softmax_scale=SCALE, out=out)
    assert f"[2, {got}, 576]" in caught.value.got
    assert f"[2, {planned}, 576]" in caught.value.allowed
    assert out.isnan().all()
    assert not decoder.calls


@pytest.mark.fault("HEADS-07")
@pytest.mark.parametrize("arch", ARCHS)
def test_fp8_writes_every_row_of_every_head_count(arch):
    for heads in GROUPS:
        serve(
            problem_of(heads, dtypes="fp8 fp8"),
            ("rocm_aiter", amd(arch)),
            [70, 3],
        )


@pytest.mark.fault("HEADS-07")
def test_the_kit_names_a_row_that_was_not_written():
    case = "out.every_row_written"
    mutant = MUTANTS["last_row_unwritten"]
    target = Target(backend="reference", device=CPU, mutant=mutant.name)
    found = run_case(case, mutant.apply(narrow()), target)
    assert found.outcome is Outcome.FAILED
    assert run_case(case, narrow(), target).outcome is Outcome.PASSED


@pytest.mark.fault("HEADS-09")
@pytest.mark.parametrize("native", [{64, 128}, {16, 32, 128}, {48, 80, 112}])
def test_heads_are_padded_to_the_smallest_native_width(native):
    server = (narrow(num_q_heads=frozenset(native)), CPU)
    for heads in range(1, max(native) + 1):
        decoder = decoder_of(problem_of(heads), server, "exact")
        width = min(width for width in native if width >= heads)
        assert decoder.selection.plan.cost.rows == width
    serve(problem_of(33), server, [70, 3], lowering="exact")


@pytest.mark.fault("HEADS-10")
def test_32_heads_without_a_schedule_never_run_as_one_split():
    problem = problem_of(32, max_num_reqs=512, max_model_len=64)
    lens = [1 + at % 3 for at in range(40)]
    decoder, step, _ = serve(problem, ("rocm_aiter", amd("gfx942")), lens)
    plan = decoder.plan(step.common)
    assert plan.schedule is None
    for requests in (1, 7, 256, 512):
        assert decoder.builder._splits_of(requests)[0] >= 2
    decoder, step, _ = serve(problem, ("rocm_aiter", amd()), lens[:8])
    assert decoder.plan(step.common).schedule is not None


@pytest.mark.fault("HEADS-11")
@pytest.mark.parametrize("heads", [4, 12])
def test_the_sizing_helper_is_never_asked_about_few_heads(heads):
    with simulated("gfx950") as machine:
        aiter_module = __import__("aiter")
        with pytest.raises(AssertionError, match=r"^$"):
            aiter_module.get_mla_metadata_info_v1(
                2, 1, heads, torch.bfloat16, torch.bfloat16, False
            )
        serve(problem_of(heads), ("rocm_aiter", amd()), [10, 30])
        assert machine.schedules == 1


@pytest.mark.fault("HEADS-11")
def test_an_assertion_of_the_helper_comes_back_with_the_shape(monkeypatch):
    def asserts(*_args, **_kwargs):
        raise AssertionError

    with simulated("gfx950"):
        monkeypatch.setattr("aiter.get_mla_metadata_info_v1", asserts)
        with pytest.raises(BackendRefused) as caught:
            decoder_of(problem_of(12), ("rocm_aiter", amd()))
    (reason,) = caught.value.refusals
    assert reason.code is RefusalCode.VERSION
    assert "12 heads (16 after padding)" in reason.got
    assert "probe" in reason.fix
    assert isinstance(caught.value.__cause__, AssertionError)


@pytest.mark.fault("HEADS-12")
@pytest.mark.parametrize("arch", ARCHS)
def test_each_head_count_is_right_with_lse_and_without(arch):
    server = ("rocm_aiter", amd(arch))
    served = []
    for heads in GROUPS:
        without = problem_of(heads, dtypes="fp8 fp8")
        serve(without, server, [70, 3])
        with_lse = problem_of(heads, dtypes="fp8 fp8", needs_lse=True)
        if backend.refusals(with_lse, server[1]):
            assert codes(with_lse, server) == {"lse"}
        else:
            serve(with_lse, server, [70, 3])
            served.append(heads)
    assert 64 in served


def test_the_servers_are_what_their_names_say():
    words = [
        decoder_of(problem_of(), server).backend.evidence(server[1])
        for server in SERVERS.values()
    ]
    # What is known from cards comes after what runs here.
    assert [word.split("; ")[0] for word in words] == [
        "reference",
        "simulated, never on AMD",
        "simulated",
        "interpreted",
    ]
    assert Mask.CAUSAL in problem_of().masks
    assert isinstance(CPU, DeviceInfo)
