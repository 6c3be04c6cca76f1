"""Who is chosen: the documented order, every reason, and no silent slide."""

import logging
import re

import pytest

from mla_decode import (
    ArgumentError,
    BackendRefused,
    Candidate,
    DecodeProblem,
    DeviceInfo,
    Mask,
    OutdatedLibraryError,
    Refusal,
    RefusalCode,
    discover,
    select,
    survey,
)
from mla_decode.selection import AUTO_ORDER

BLOCK = DecodeProblem(
    num_q_heads=16, query_lens={4}, masks={Mask.NON_CAUSAL}, page_size=64
)
CAUSAL = DecodeProblem(num_q_heads=16)
GFX942 = DeviceInfo.assume("gfx942")
SM_90 = DeviceInfo.assume("sm_90")


@pytest.fixture
def backends(plain_backend_cls):
    """A function from names and methods to candidates of synthetic backends."""

    def make(**methods):
        return {
            name: Candidate(
                name=name,
                backend=type(name, (plain_backend_cls,), {"name": name, **own})(),
            )
            for name, own in methods.items()
        }

    return make


def refuse(code=RefusalCode.NUM_HEADS):
    reason = Refusal(code=code, message="No", got="16", allowed="128", fix="use 128")
    return {"refusals": lambda *_: [reason]}


def raises(error):
    def method(*_):
        raise error

    return method


TOO_OLD = OutdatedLibraryError(
    "No causal argument.",
    library="amd-aiter",
    installed="0.1.13",
    first_supported="0.1.18",
)


def test_auto_on_a_cpu_is_the_reference(cpu):
    found = select(CAUSAL, cpu)
    assert found.backend.name == "reference"
    assert found.plan.kind == "native"
    assert found.refused == {}


def test_auto_walks_the_vendors_order_and_keeps_every_reason(backends):
    known = backends(rocm_aiter=refuse(), triton_mla={})
    found = select(CAUSAL, GFX942, candidates=known)
    assert found.backend.name == "triton_mla"
    assert [r.code.value for r in found.refused["rocm_aiter"]] == ["num_heads"]


def test_auto_prefers_an_order_of_the_architecture(backends):
    known = backends(cuda_flashmla={}, triton_mla={}, reference={})
    assert (
        select(CAUSAL, SM_90, candidates=known).backend.name == AUTO_ORDER["sm_90"][0]
    )


def test_auto_on_a_gpu_never_takes_the_reference(backends):
    known = backends(reference={}, triton_mla=refuse())
    with pytest.raises(BackendRefused) as caught:
        select(CAUSAL, SM_90, candidates=known)
    assert "reference" not in caught.value.refused
    assert select(CAUSAL, SM_90, "reference", candidates=known).backend.name == (
        "reference"
    )


def test_third_parties_are_asked_after_the_documented_ones(backends):
    known = backends(zeta={}, alpha={}, triton_mla=refuse(), rocm_aiter={})
    assert select(CAUSAL, SM_90, candidates=known).backend.name == "alpha"


def test_an_explicit_name_is_honoured_or_raises(backends):
    known = backends(rocm_aiter=refuse(), triton_mla={})
    with pytest.raises(BackendRefused) as caught:
        select(CAUSAL, GFX942, "rocm_aiter", candidates=known)
    assert list(caught.value.refused) == ["rocm_aiter"]
    named = select(CAUSAL, GFX942, "triton_mla", candidates=known)
    assert (named.backend.name, named.refused) == ("triton_mla", {})
    assert select(CAUSAL, GFX942, "auto", candidates=known).backend.name == "triton_mla"


def test_a_name_that_nobody_has_lists_those_there_are(backends):
    with pytest.raises(ArgumentError) as caught:
        select(CAUSAL, GFX942, "flashinfer", candidates=backends(b={}, a={}))
    assert caught.value.allowed == "a, b"
    with pytest.raises(ArgumentError, match="No backend has this name"):
        select(CAUSAL, GFX942, ["a"], candidates=backends(b={}, a={}))


def test_an_absent_adapter_says_what_to_install():
    with pytest.raises(BackendRefused, match="pip install mla-decode-rocm-aiter"):
        select(CAUSAL, GFX942, candidates=discover([]))


def test_a_candidate_without_backend_or_reason_is_no_choice():
    found = survey(CAUSAL, SM_90, candidates={"x": Candidate(name="x")})
    assert found.selection is None
    assert found.refused == {"x": ()}


def test_nobody_accepts_raises_with_the_reasons_of_all(backends):
    known = backends(
        rocm_aiter=refuse(RefusalCode.PAGE_SIZE), triton_mla=refuse(RefusalCode.DTYPE)
    )
    with pytest.raises(BackendRefused) as caught:
        select(CAUSAL, GFX942, candidates=known)
    assert caught.value.codes == {"page_size", "dtype"}
    assert re.search(
        r"No backend serves \d+ heads, .* page \d+ on gfx942\.", str(caught.value)
    )


@pytest.mark.parametrize("method", ["refusals", "cost"])
def test_a_check_that_raises_refuses_and_does_not_end_the_engine(backends, method):
    broken = {method: raises(ZeroDivisionError("by zero"))}
    known = backends(rocm_aiter=broken, triton_mla={})
    found = select(CAUSAL, GFX942, candidates=known)
    (reason,) = found.refused["rocm_aiter"]
    assert reason.code.value == "checker_error"
    assert reason.got == "ZeroDivisionError: by zero"
    assert "rocm_aiter" in reason.fix


def test_a_check_that_knows_the_mend_is_quoted(backends):
    error = ArgumentError("No such release.", got="'x'", allowed="a release", fix="y")
    known = backends(rocm_aiter={"refusals": raises(error)}, triton_mla={})
    found = select(CAUSAL, GFX942, candidates=known)
    (reason,) = found.refused["rocm_aiter"]
    assert reason.as_dict() == {
        "code": "checker_error",
        "message": "No such release",
        "got": "'x'",
        "allowed": "a release",
        "fix": "y",
    }


def test_a_gate_that_raises_adds_its_own_reason(backends):
    broken = {**refuse(), "supports_non_causal": raises(OSError("no library"))}
    known = backends(rocm_aiter=broken, triton_mla={})
    found = select(BLOCK, GFX942, candidates=known)
    codes = [r.code.value for r in found.refused["rocm_aiter"]]
    assert codes == ["num_heads", "checker_error"]


def test_an_outdated_library_stops_auto_before_a_slower_backend(backends):
    old = {**refuse(RefusalCode.VERSION), "supports_non_causal": raises(TOO_OLD)}
    known = backends(rocm_aiter=old, triton_mla={})
    with pytest.raises(OutdatedLibraryError) as caught:
        select(BLOCK, GFX942, candidates=known)
    assert caught.value is TOO_OLD
    found = survey(BLOCK, GFX942, candidates=known)
    assert found.selection is None
    assert found.outdated is TOO_OLD
    assert [r.code.value for r in found.refused["rocm_aiter"]] == ["version"]


def test_the_ways_out_of_an_outdated_library_work(backends):
    old = {**refuse(RefusalCode.VERSION), "supports_non_causal": raises(TOO_OLD)}
    known = backends(rocm_aiter=old, triton_mla={})
    named = select(BLOCK, GFX942, "triton_mla", candidates=known)
    assert named.backend.name == "triton_mla"
    causal = select(CAUSAL, GFX942, candidates=known)
    assert causal.backend.name == "triton_mla"


@pytest.mark.parametrize("lowering", ["maybe", None, ["exact"]])
def test_lowering_is_refuse_or_exact(cpu, lowering):
    with pytest.raises(ArgumentError, match="names no policy"):
        select(CAUSAL, cpu, lowering=lowering)


def test_lowering_serves_within_a_backend_before_the_next_is_asked(backends):
    def one_token(self, problem, device):
        del self, device
        lens = problem.query_lens
        return refuse()["refusals"](None, None, None) if lens != {1} else []

    known = backends(rocm_aiter={"refusals": one_token}, triton_mla={})
    assert select(BLOCK, GFX942, candidates=known).backend.name == "triton_mla"
    lowered = select(BLOCK, GFX942, lowering="exact", candidates=known)
    assert lowered.backend.name == "rocm_aiter"
    assert lowered.plan.kind in {"fold", "split"}


def test_a_plan_that_does_not_exist_adds_why_to_the_reasons(backends):
    known = backends(rocm_aiter=refuse())
    with pytest.raises(BackendRefused) as caught:
        select(BLOCK, GFX942, "rocm_aiter", "exact", candidates=known)
    assert "num_heads" in caught.value.codes


def test_a_choice_logs_one_line_with_who_refused(backends, caplog):
    known = backends(rocm_aiter=refuse(), triton_mla={})
    with caplog.at_level(logging.INFO, logger="mla_decode"):
        select(BLOCK, GFX942, candidates=known)
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith(
        "triton_mla decodes 16 heads, 4 token(s) non_causal, bf16 query"
    )
    assert "'rocm_aiter': ['num_heads']" in line
