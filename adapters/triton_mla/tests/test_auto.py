"""One backend over both kernels: which one serves, and that every answer is its own."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from triton_steps import make_step, relative_error

from mla_decode import (
    BackendRefused,
    Candidate,
    Dcp,
    DecodeProblem,
    DeviceInfo,
    Mask,
    MLADecoder,
    StaleMetadataError,
    detect_device,
)
from mla_decode.answers import answers_of
from mla_decode.cli.explain import notes
from mla_decode.selection import select
from mla_decode.workspace import core_bytes, held_bytes
from mla_decode_triton import chosen_backend
from mla_decode_triton.auto import HOPPER, PORTABLE, choose
from mla_decode_triton.hopper import capability
from mla_decode_triton.hopper.capability import CAPABILITY as HOPPER_CAPABILITY

auto = chosen_backend("auto")
CARD = DeviceInfo(vendor="cuda", arch="sm_90")
SM_90 = DeviceInfo.assume("sm_90")
GFX942 = DeviceInfo.assume("gfx942")
CARD_EVIDENCE = (
    "interpreted; the Hopper kernel, where a card takes it: "
    "contract kit on an H200, 2026-11-30"
)


def problem_of(**fields):
    return DecodeProblem(**{"num_q_heads": 16, "max_num_reqs": 8, **fields})


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """The Triton that is installed, whatever is; returns what changes it."""

    def install(version):
        monkeypatch.setattr(capability, "installed_triton", lambda: version)

    install("3.6.0")
    return install


PASSED_OVER = [
    ({"page_size": 1}, "page_size"),
    ({"max_num_reqs": 1025}, "feature"),
    ({"max_splits": 4}, "feature"),
    ({"batch_invariant": True}, "determinism"),
    ({"kv_page_stride": 64 * 576 + 4}, "feature"),
]
"""What the portable kernel alone serves."""


def test_a_card_takes_the_hopper_kernel():
    in_graphs = {"query_lens": {1, 3}, "graphs": True, "masks": set(Mask)}
    for fields, *names in [
        ({}, "swap_kernel"),
        ({"kv_dtype": "fp8"}, "swap_fp8_kernel"),
        ({"kv_dtype": "fp8", "query_lens": {1, 2}}, "swap_fp8_kernel"),
        (
            {"kv_dtype": "fp8", "query_lens": {1, 3}},
            *("asym_fp8_kernel", "swap_fp8_kernel"),
        ),
        (in_graphs, "asym_kernel"),
    ]:
        problem = problem_of(**fields)
        assert choose(problem, CARD).backend is HOPPER
        assert auto.kernel_names(problem, CARD) == (*names, "merge_kernel")
        note = f"kernel: the Hopper one ({' or '.join(names)} + merge_kernel)"
        assert auto.notes(problem, CARD) == [note]


@pytest.mark.parametrize(("fields", "code"), PASSED_OVER)
@pytest.mark.parametrize("device", [CARD, SM_90], ids=["card", "assumed"])
def test_what_it_refuses_the_portable_kernel_serves_and_explain_says_why(
    device, fields, code
):
    problem = problem_of(**fields)
    assert not auto.refusals(problem, device)
    assert choose(problem, device).backend is PORTABLE
    assert auto.kernel_names(problem, device)[0] == "decode_kernel"
    (note,) = auto.notes(problem, device)
    assert note.startswith("kernel: the portable one (decode_kernel")
    assert f"the Hopper one is passed over: [{code}] " in note
    assert "\n" not in note


@pytest.mark.parametrize(
    ("device", "version", "got"),
    [
        (CARD, "3.5.1", "triton 3.5.1"),
        (CARD, None, "no triton"),
        (SM_90, "3.5.1", "triton 3.5.1"),
    ],
    ids=["card", "card without", "assumed"],
)
def test_an_older_triton_has_the_portable_kernel_alone(triton, device, version, got):
    triton(version)
    problem = problem_of()
    assert choose(problem, device).backend is PORTABLE
    assert (
        f"[dependency] the Hopper kernel needs Triton's Gluon (got {got};"
        in (auto.notes(problem, device)[0])
    )
    assert auto.evidence(device) == PORTABLE.evidence(device)


def test_a_machine_without_triton_says_nothing_against_an_assumed_card(triton):
    triton(None)
    problem = problem_of()
    assert choose(problem, SM_90).backend is PORTABLE
    assert choose(problem, SM_90).passed_over == ()
    (note,) = auto.notes(problem, SM_90)
    assert note == (
        "kernel: the portable one (decode_kernel + merge_kernel), interpreted; a card "
        "with triton 3.6 or newer would take the Hopper one (swap_kernel + merge_kernel)"
    )
    assert auto.evidence(SM_90) == CARD_EVIDENCE
    (note,) = auto.notes(problem_of(page_size=1), SM_90)
    assert "the Hopper one is passed over: [page_size] " in note
    assert "triton" not in note


@pytest.mark.parametrize("arch", ["gfx942", "sm_100", "sm_80"])
def test_other_architectures_have_the_portable_kernel_alone(arch):
    problem = problem_of()
    assumed = DeviceInfo.assume(arch)
    for device in (assumed, replace(assumed, assumed=False)):
        chosen = choose(problem, device)
        assert chosen.backend is PORTABLE
        assert chosen.passed_over == ()
        assert auto.notes(problem, device) == []
        assert auto.evidence(device) == PORTABLE.evidence(device)
        assert type(auto.answers(device)) is type(PORTABLE.answers(device))


def test_elsewhere_nothing_of_the_hopper_kernel_is_imported_or_asked():
    script = (
        "import sys\n"
        "from mla_decode import DecodeProblem, DeviceInfo, select\n"
        "from mla_decode_triton import backend\n"
        "from mla_decode_triton.hopper.capability import installed_triton\n"
        "device = DeviceInfo.assume('gfx942')\n"
        "problem = DecodeProblem(num_q_heads=16, query_lens={1, 4})\n"
        "select(problem, device, 'triton_mla', lowering='exact')\n"
        "builder = backend.builder_cls(problem, device)\n"
        "where = 'mla_decode_triton.hopper.', 'triton.experimental'\n"
        "loaded = [name for name in sys.modules if name.startswith(where)]\n"
        "print(sorted(loaded), installed_triton.cache_info().misses)\n"
    )
    environment = {**os.environ, "MLA_DECODE_TRITON_KERNEL": ""}
    told = subprocess.check_output(
        [sys.executable, "-c", script], text=True, env=environment
    )
    light = [f"mla_decode_triton.hopper.{n}" for n in ("backend", "capability", "grid")]
    assert told == f"{light} 0\n"


def test_an_assumed_card_is_interpreted_and_told_what_a_real_one_takes():
    problem = problem_of(num_q_heads=128)
    assert choose(problem, SM_90).backend is PORTABLE
    assert auto.evidence(SM_90) == CARD_EVIDENCE
    (note,) = auto.notes(problem, SM_90)
    assert note == (
        "kernel: the portable one (decode_kernel + merge_kernel), interpreted; "
        "a card would take the Hopper one (asym_kernel or swap_kernel + merge_kernel)"
    )


def test_the_evidence_of_a_card_tells_the_kernels_apart():
    assert auto.evidence(CARD).startswith("hardware; the Hopper kernel")
    assert auto.evidence(CARD).endswith("contract kit on an H200, 2026-11-30")


def test_refuses_what_neither_serves_with_the_portable_kernels_reasons():
    problem = problem_of(page_size=256)
    for device in (CARD, SM_90, GFX942):
        reasons = auto.refusals(problem, device)
        assert [str(reason.code) for reason in reasons] == ["page_size"]
        assert reasons == PORTABLE.refusals(problem, device)


def test_the_hopper_kernel_serves_nothing_that_the_row_does_not_declare():
    (hopper,) = HOPPER_CAPABILITY.rows
    row = auto.capability.row("sm_90")
    for name in ("dtypes", "out_dtypes", "page_sizes", "num_q_heads"):
        assert set(getattr(hopper, name)) <= set(getattr(row, name))
    for mask in Mask:
        assert set(hopper.query_lens[mask]) <= set(row.query_lens[mask])
    assert hopper.features.items() <= row.features.items()
    assert hopper.max_num_reqs <= row.max_num_reqs


@pytest.mark.parametrize(
    "fields", [{}, *(fields for fields, _ in PASSED_OVER)], ids=str
)
@pytest.mark.parametrize(
    "device", [CARD, SM_90, GFX942], ids=["card", "assumed", "amd"]
)
def test_cost_answers_and_workspace_are_the_serving_kernels(device, fields):
    problem = problem_of(**fields)
    serving = choose(problem, device).backend
    cost = serving.cost(problem, device)
    assert auto.cost(problem, device) == cost
    assert auto.workspace_bytes(problem, device) == cost.workspace_bytes
    answers = answers_of(auto, device)
    assert answers.cost(problem) == cost
    assert list(answers.refusals(problem)) == auto.refusals(problem, device)
    for query_len, mask in problem.blocks():
        walks = answers.fewest_walks(problem, query_len, mask, problem.num_q_heads)
        assert walks <= cost.kv_walks


def test_an_older_triton_has_the_cost_and_the_bound_of_the_portable_kernel(triton):
    assert auto.answers(CARD) == auto.answers(CARD)
    assert hash(auto.answers(CARD)) == hash(auto.answers(CARD))
    problem = problem_of(num_q_heads=128)
    for version, serving in (("3.6.0", HOPPER), ("3.5.0", PORTABLE)):
        triton(version)
        answers = auto.answers(CARD)
        assert answers.cost(problem) == serving.cost(problem, CARD)
    words = problem, 1, Mask.CAUSAL, 128
    assert answers.fewest_walks(*words) == PORTABLE.answers(CARD).fewest_walks(*words)


def test_no_bound_of_walks_where_there_are_no_kernels():
    answers = auto.answers(DeviceInfo.assume("gfx90a"))
    assert answers.fewest_walks(problem_of(), 1, Mask.CAUSAL, 16) is None


def test_the_bound_of_walks_is_that_of_either_kernel():
    for num_q_heads, query_len in [(16, 1), (16, 2), (128, 1), (128, 32), (5, 7)]:
        words = problem_of(), query_len, Mask.CAUSAL, num_q_heads
        assert auto.answers(CARD).fewest_walks(*words) == min(
            HOPPER.answers(CARD).fewest_walks(*words),
            PORTABLE.answers(CARD).fewest_walks(*words),
        )


def decoder_of(problem, lowering="refuse", device=SM_90):
    candidates = {"triton_mla": Candidate(name="triton_mla", backend=auto)}
    return MLADecoder(problem, device=device, candidates=candidates, lowering=lowering)


@pytest.mark.parametrize(
    ("page_size", "path", "reasons"), [(64, "", 0), (1, "portable kernel", 1)]
)
def test_the_step_report_says_what_was_passed_over(page_size, path, reasons):
    problem = problem_of(page_size=page_size, num_q_heads=2, max_model_len=64)
    decoder = decoder_of(problem)
    step = make_step(problem, SM_90, [20, 5], query_len=1, causal=True)
    plan = decoder.plan(step.common)
    out = decoder.run(step.q, step.kv_cache, plan, softmax_scale=192**-0.5).out
    assert relative_error(out, step.oracle()[0]) < 8e-3
    report = decoder.report()
    assert report.kernels[0] == "decode_kernel"
    assert report.path == path
    assert len(report.downgrades) == reasons
    assert all("page_size" in str(downgrade) for downgrade in report.downgrades)


def test_elsewhere_the_portable_kernel_is_no_downgrade():
    problem = problem_of(num_q_heads=2, max_model_len=64)
    decoder = decoder_of(problem, device=GFX942)
    step = make_step(problem, GFX942, [20], query_len=1, causal=True)
    decoder.plan(step.common)
    assert decoder.report().downgrades == ()


def test_explain_asks_of_what_a_lowering_serves():
    """A causal block under context parallel becomes one-token rows."""
    problem = problem_of(query_lens={2}, needs_lse=True, dcp=Dcp(world=2))
    candidates = {"triton_mla": Candidate(name="triton_mla", backend=auto)}
    chosen = select(problem, CARD, lowering="exact", candidates=candidates)
    assert chosen.plan.kind == "split"
    assert notes(chosen, CARD) == [
        "kernel: the Hopper one (swap_kernel + merge_kernel)"
    ]


def test_a_builder_is_one_of_the_serving_kernels():
    problem = problem_of(graphs=True, query_lens={1, 2})
    builder = auto.builder_cls(problem, SM_90)
    assert isinstance(builder, auto.builder_cls)
    assert isinstance(builder, PORTABLE.builder_cls)
    assert builder.serving is PORTABLE
    held = held_bytes(builder) - core_bytes(problem, joins=False)
    assert held == auto.workspace_bytes(problem, SM_90)
    again = type(builder)(problem, SM_90)
    assert type(again) is type(builder) is type(auto.builder_cls(problem, GFX942))
    with pytest.raises(BackendRefused) as refused:
        auto.builder_cls(problem_of(num_q_heads=200), SM_90)
    assert refused.value.codes == {"num_heads"}


def test_classes_that_derive_from_its_builder_keep_the_kernels_methods():
    base = auto.builder_cls
    seen = []

    class Watched(base):
        def __init__(self, problem, device=None, **words):
            seen.append("init")
            base.__init__(self, problem, device, **words)

    builder = Watched(problem_of(), SM_90)
    assert isinstance(builder, Watched)
    assert builder.partial_out.dtype is torch.float32
    assert seen == ["init"]


@pytest.mark.cuda
@pytest.mark.parametrize(("page_size", "serving"), [(64, HOPPER), (1, PORTABLE)])
def test_a_card_decodes_by_either_kernel_in_the_memory_that_is_told(page_size, serving):
    device = detect_device()
    if device.arch != "sm_90":
        pytest.skip("needs a Hopper GPU (issue 10)")
    problem = problem_of(page_size=page_size, query_lens={1, 4}, graphs=True)
    builder = auto.builder_cls(problem, device)
    assert builder.serving is serving
    held = held_bytes(builder) - core_bytes(problem, joins=False)
    assert held == auto.workspace_bytes(problem, device)
    for query_len in (1, 4):
        step = make_step(problem, device, [700, 40], query_len=query_len, causal=True)
        out = step.run(builder, by=auto).out
        assert relative_error(out, step.oracle()[0].cpu()) < 8e-3


def test_a_metadata_of_the_portable_backends_own_builder_is_not_its():
    problem = problem_of(num_q_heads=2)
    step = make_step(problem, SM_90, [5], query_len=1, causal=True)
    with pytest.raises(StaleMetadataError, match="another backend's builder"):
        step.run(PORTABLE.builder_cls(problem, SM_90), by=auto)
