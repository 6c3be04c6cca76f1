"""The numeric check at first use refuses what computes wrong, with its evidence."""

import pytest
import torch

from mla_decode import BackendRefused, DecodeProblem, Mask
from mla_decode.reference import ReferenceBackend
from mla_decode.self_check import self_check


def problem_of(**kwargs):
    settings = {
        "num_q_heads": 4,
        "query_lens": frozenset({1, 2}),
        "masks": frozenset(Mask),
        "max_num_reqs": 2,
        "max_model_len": 64,
    }
    return DecodeProblem(**{**settings, **kwargs})


class Wrong(ReferenceBackend):
    """Applies one mask to everything."""

    name = "wrong"

    def __init__(self, causal):
        self.causal = causal

    def _forward(self, call):
        if call.metadata.query_len > 1:
            call.metadata.causal = self.causal
        super()._forward(call)


class NotANumber(ReferenceBackend):
    name = "not_a_number"

    def _forward(self, call):
        call.out.fill_(torch.nan)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"q_dtype": "fp8", "kv_dtype": "fp8"},
        {"kv_dtype": "fp8"},
        {"q_dtype": "fp32", "kv_dtype": "fp32", "out_dtype": "fp32"},
        {"kv_page_stride": 64 * 576 + 128},
        {"page_size": 4},
        {"query_lens": frozenset({16})},
    ],
)
def test_the_reference_passes(kwargs):
    backend = ReferenceBackend()
    builder = backend.builder_cls(problem_of(**kwargs), "cpu")
    checks = self_check(backend, builder)
    assert len(checks) == len(list(builder.problem.blocks()))
    assert all(check.passed and check.relative_error > 0 for check in checks)


@pytest.mark.parametrize("causal", [True, False])
def test_a_wrong_mask_is_refused_with_its_error(causal):
    backend = Wrong(causal)
    builder = backend.builder_cls(problem_of(), "cpu")
    with pytest.raises(BackendRefused, match="self-check") as refused:
        self_check(backend, builder)
    (reason,) = refused.value.refusals
    wrong = "non_causal" if causal else "causal"
    assert str(reason.code) == "checker_error"
    assert f"Wrong values for a {wrong} block of 2" in reason.message
    assert float(reason.got.split()[-1]) > 0.1


def test_nan_never_passes():
    backend = NotANumber()
    builder = backend.builder_cls(problem_of(), "cpu")
    with pytest.raises(BackendRefused, match="self-check"):
        self_check(backend, builder)


def test_a_decoder_checks_where_it_is_asked_to(decoder):
    decoder(Wrong(causal=True), problem_of(), lowering="refuse")
    with pytest.raises(BackendRefused, match="self-check"):
        decoder(Wrong(causal=True), problem_of(), lowering="refuse", check_values=True)


def test_a_rewrite_is_checked_like_a_kernel(decoder, narrow):
    backend = narrow({(1, Mask.CAUSAL, 8): 1})
    kwargs = {"query_lens": frozenset({2}), "masks": frozenset({Mask.NON_CAUSAL})}
    problem = problem_of(**kwargs, q_dtype="fp32", kv_dtype="fp32", out_dtype="fp32")
    checked = decoder(backend, problem, check_values=True)
    assert checked.selection.plan.kind == "fold"


class Versioned(Wrong):
    """Tells which library it calls."""

    def library_versions(self, device):
        return {"some-lib": f"1.2 for {device.arch}"}


def test_a_wrong_library_is_named_with_its_version(decoder):
    with pytest.raises(BackendRefused, match=r"wrong \(some-lib 1\.2 for cpu\) failed"):
        decoder(Versioned(causal=True), problem_of(), check_values=True)
