"""The runner cannot be talked into a pass."""

import copy
import sys
import unittest
from dataclasses import replace

import pytest
import torch

from mla_decode.capability import Capability, Feature, Support
from mla_decode.errors import BackendRefused
from mla_decode.mask import Mask
from mla_decode.reference.builder import ReferenceMetadataBuilder
from mla_decode.refusal import Refusal, RefusalCode
from mla_decode_contract import registry
from mla_decode_contract.mutants.mutant import derive, derive_builder
from mla_decode_contract.outcome import FailureKind, Outcome
from mla_decode_contract.runner import run_case


def _narrow(backend, **changes):
    """The reference with a narrower row for the CPU; its builder still serves all."""
    row = replace(backend.capability.row("cpu"), **changes)
    return derive(backend, capability=Capability(rows=(row,)))


def _refusing_builder(backend, error):
    class Refusing(ReferenceMetadataBuilder):
        def __init__(self, problem, device=None, **kwargs):
            super().__init__(problem, device, **kwargs)
            reasons = backend.refusals(problem, self.device_info)
            if reasons:
                raise error(reasons)

    return derive(backend, builder_cls=property(lambda _: Refusing))


def _typed(reasons):
    return BackendRefused("refused.", {"reference": reasons})


CAUSAL_ONLY = {"query_lens": {Mask.CAUSAL: range(1, 65)}}


def test_works_though_declared_unsupported_fails(reference, target):
    narrow = _narrow(reference, **CAUSAL_ONLY)
    result = run_case("mask.non_causal.sees_siblings", narrow, target)
    assert result.outcome is Outcome.FAILED
    assert result.failure.kind is FailureKind.REFUSAL
    assert "works though declared unsupported" in result.failure.message


def test_a_typed_refusal_of_what_is_undeclared_counts_apart(reference, target):
    narrow = _refusing_builder(_narrow(reference, **CAUSAL_ONLY), _typed)
    result = run_case("mask.non_causal.sees_siblings", narrow, target)
    assert result.outcome is Outcome.REFUSED
    assert {reason["code"] for reason in result.refusals} == {"mask"}


@pytest.mark.parametrize(
    "error", [AssertionError, KeyError, RuntimeError], ids=lambda error: error.__name__
)
def test_an_untyped_refusal_fails(reference, target, error):
    narrow = _refusing_builder(_narrow(reference, **CAUSAL_ONLY), error)
    result = run_case("mask.non_causal.sees_siblings", narrow, target)
    assert result.failure.kind is FailureKind.REFUSAL
    assert error.__name__ in result.failure.message


def test_a_refusal_with_another_code_fails(reference, target):
    def refusals(self, problem, device):
        del self, device
        wrong = any(mask is Mask.NON_CAUSAL for _, mask in problem.blocks())
        reason = Refusal(
            code=RefusalCode.ARCH, message="no", got="a", allowed="b", fix="c"
        )
        return [reason] if wrong else []

    narrow = derive(_narrow(reference, **CAUSAL_ONLY), refusals=refusals)
    result = run_case("mask.non_causal.sees_siblings", narrow, target)
    assert result.failure.kind is FailureKind.REFUSAL
    assert "gave codes [arch]" in result.failure.message


def test_refused_though_declared_fails(reference, target):
    right = type(reference).refusals

    def refusals(self, problem, device):
        reasons = right(self, problem, device)
        if any(mask is Mask.NON_CAUSAL for _, mask in problem.blocks()):
            reason = Refusal(
                code=RefusalCode.MASK, message="no", got="a", allowed="b", fix="c"
            )
            reasons.append(reason)
        return reasons

    shy = derive(reference, refusals=refusals)
    result = run_case("mask.non_causal.sees_siblings", shy, target)
    assert result.failure.kind is FailureKind.REFUSAL
    assert "the capability row declares" in result.failure.message


def _lacking_fp8(reference):
    """A row with fp8, over a library that was built without it."""

    def refusals(self, problem, device):
        reasons = type(reference).refusals(self, problem, device)
        if problem.kv_dtype == "fp8":
            reasons.append(
                Refusal(
                    code=RefusalCode.DEPENDENCY,
                    message="the installed build has no fp8 kernels",
                    got="a",
                    allowed="b",
                    fix="c",
                )
            )
        return reasons

    return derive(reference, refusals=refusals)


def test_what_the_installed_library_lacks_is_refused_with_its_own_code(
    reference, target
):
    lacking = _lacking_fp8(reference)
    served = run_case("scale.fp8_is_applied", lacking, target)
    assert "works though declared unsupported" in served.failure.message
    typed = _refusing_builder(lacking, _typed)
    refused = run_case("scale.fp8_is_applied", typed, target)
    assert refused.outcome is Outcome.REFUSED
    assert refused.notes == ("declared, but not in the installed library",)


def test_a_backend_that_accepts_nothing_fails_with_its_reasons(reference, target):
    closed = _narrow(
        reference, dtypes=frozenset({("fp8", "bf16")}), out_dtypes=frozenset({"fp16"})
    )
    refuse = derive(
        closed,
        refusals=lambda *_: [
            Refusal(
                code=RefusalCode.DEPENDENCY,
                message="absent",
                got="a",
                allowed="b",
                fix="c",
            )
        ],
    )
    result = run_case("lengths.one_key", refuse, target)
    assert "no problem is accepted on cpu" in result.failure.message
    assert "absent" in result.failure.message


@pytest.mark.parametrize(
    "leave",
    [
        lambda _: pytest.skip("no"),
        lambda _: pytest.xfail("no"),
        lambda _: (_ for _ in ()).throw(unittest.SkipTest("no")),
    ],
    ids=["skip", "xfail", "unittest"],
)
def test_a_skip_inside_a_case_fails(reference, target, monkeypatch, leave):
    cases = {**registry.implementations(), "lengths.one_key": leave}
    monkeypatch.setattr("mla_decode_contract.runner.implementations", lambda: cases)
    result = run_case("lengths.one_key", reference, target)
    assert result.outcome is Outcome.FAILED
    assert result.failure.kind is FailureKind.SKIP


def test_an_exit_inside_a_case_is_contained(reference, target):
    leaver = derive(reference, forward=lambda *_, **__: sys.exit(1))
    result = run_case("lengths.one_key", leaver, target)
    assert result.failure.kind is FailureKind.CONTAINMENT
    assert "exit(1)" in result.failure.message


def test_an_unforeseen_exception_is_a_crash_and_no_assertion(reference, target):
    broken = derive(reference, forward=lambda *_, **__: 1 / 0)
    result = run_case("lengths.one_key", broken, target)
    assert result.failure.kind is FailureKind.CRASH
    assert "ZeroDivisionError: division" in result.failure.message


def test_an_unwritten_buffer_fails(reference, target):
    def forward(self, *args, **kwargs):
        copies = {k: kwargs[k].clone() for k in ("out", "lse") if k in kwargs}
        result = type(reference).forward(self, *args, **{**kwargs, **copies})
        return result._replace(**{k: kwargs[k] for k in copies})

    result = run_case("out.filled_in_place", derive(reference, forward=forward), target)
    assert result.failure.kind is FailureKind.VALUE


def test_a_write_past_the_buffer_fails(reference, target):
    def forward(self, *args, **kwargs):
        result = type(reference).forward(self, *args, **kwargs)
        flat = result.out.new_empty(0).set_(
            result.out.untyped_storage(),
            result.out.storage_offset() + result.out.numel(),
            (1,),
        )
        flat.fill_(0)
        return result

    result = run_case("out.canaries", derive(reference, forward=forward), target)
    assert result.failure.kind is FailureKind.VALUE
    assert "overwritten" in result.failure.message


def test_a_changed_environment_fails(reference, target, monkeypatch):
    monkeypatch.setenv("MLA_DECODE_TEST_STEPS", "0")

    def forward(self, *args, **kwargs):
        count = int(sys.modules["os"].environ["MLA_DECODE_TEST_STEPS"])
        sys.modules["os"].environ["MLA_DECODE_TEST_STEPS"] = str(count + 1)
        return type(reference).forward(self, *args, **kwargs)

    result = run_case(
        "ubatch.no_global_state", derive(reference, forward=forward), target
    )
    assert "os.environ" in result.failure.message


def test_a_signature_with_an_eighth_parameter_fails(reference, target):
    base = ReferenceMetadataBuilder
    wide = derive_builder(base)
    wide._build_decode = lambda self, *, causal: (self, causal)
    backend = derive(reference, builder_cls=property(lambda _: wide))
    result = run_case("builder.signature_is_frozen", backend, target)
    assert result.failure.kind is FailureKind.VALUE


def test_graphs_declared_but_never_captured_fail(reference, target):
    features = {**reference.capability.row("cpu").features, Feature.GRAPHS: Support.YES}
    backend = _narrow(reference, features=features)
    result = run_case("stable.addresses", backend, target)
    assert result.outcome is Outcome.FAILED
    assert copy.copy(result).failure.kind is FailureKind.VALUE


class _Waits:
    """Stands for torch.cuda of a device: host reads of the lengths raise on demand."""

    def __init__(self, monkeypatch):
        self.is_watched = False
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
        monkeypatch.setattr("torch.cuda.set_sync_debug_mode", self._set)
        read = torch.Tensor.tolist

        def tolist(tensor):
            if self.is_watched and tensor.dtype == torch.int32 and tensor.numel() == 2:
                raise RuntimeError("called a synchronizing CUDA operation")
            return read(tensor)

        monkeypatch.setattr("torch.Tensor.tolist", tolist)

    def _set(self, mode):
        self.is_watched = mode == "error"


def test_a_declared_wait_of_build_passes_and_is_noted(reference, target, monkeypatch):
    _Waits(monkeypatch)
    assert reference.builder_cls.host_reads_lengths
    result = run_case("sync.no_synchronisation", reference, target)
    assert (result.outcome, result.failure) == (Outcome.PASSED, None)
    assert result.notes == (
        "build waits for the device, as host_reads_lengths declares",
    )


def test_an_undeclared_wait_of_build_fails(reference, target, monkeypatch):
    _Waits(monkeypatch)
    builder = derive_builder(ReferenceMetadataBuilder, host_reads_lengths=False)
    silent = derive(reference, builder_cls=property(lambda _: builder))
    result = run_case("sync.no_synchronisation", silent, target)
    assert result.failure.kind is FailureKind.VALUE
    assert "host_reads_lengths is not declared" in result.failure.message


def test_a_declared_wait_that_does_not_come_fails(reference, target, monkeypatch):
    _Waits(monkeypatch)
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", lambda _: None)
    result = run_case("sync.no_synchronisation", reference, target)
    assert result.failure.kind is FailureKind.VALUE
    assert "yet build does not wait" in result.failure.message


def test_a_wait_of_forward_fails_whatever_is_declared(reference, target, monkeypatch):
    _Waits(monkeypatch)
    right = type(reference).forward

    def forward(self, q, kv_cache, metadata, **kwargs):
        metadata.seq_lens.tolist()
        return right(self, q, kv_cache, metadata, **kwargs)

    result = run_case(
        "sync.no_synchronisation", derive(reference, forward=forward), target
    )
    assert result.failure.kind is FailureKind.VALUE
    assert "forward waits for the device" in result.failure.message


def test_another_error_of_a_step_is_no_wait(reference, target, monkeypatch):
    _Waits(monkeypatch)
    right = type(reference).forward
    calls = []

    def forward(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("out of memory")
        return right(self, *args, **kwargs)

    result = run_case(
        "sync.no_synchronisation", derive(reference, forward=forward), target
    )
    assert result.failure.kind is FailureKind.CRASH


def _keeping_caches(backend, most):
    """A builder that keeps views of the engine's last caches."""
    right = type(backend).forward

    def forward(self, q, kv_cache, metadata, **kwargs):
        kept = getattr(metadata.builder, "kept", [])
        metadata.builder.kept = [*kept, kv_cache.detach()][-most:]
        return right(self, q, kv_cache, metadata, **kwargs)

    return derive(backend, forward=forward)


@pytest.mark.parametrize(
    "case",
    ["ubatch.no_global_state", "stable.workspace_size", "out.workspace_poisoned"],
)
def test_a_view_of_the_engines_cache_is_no_workspace(reference, target, case):
    result = run_case(case, _keeping_caches(reference, most=1), target)
    assert (result.outcome, result.failure) == (Outcome.PASSED, None)


def test_caches_of_earlier_steps_that_are_kept_are_growth(reference, target):
    keeping = _keeping_caches(reference, most=100)
    result = run_case("stable.workspace_size", keeping, target)
    assert result.failure.kind is FailureKind.VALUE
    assert "grew with the lengths" in result.failure.message


@pytest.mark.parametrize("reads", [True, False])
def test_a_workspace_that_is_read_before_it_is_written_fails(reference, target, reads):
    right = type(reference).forward

    def forward(self, q, kv_cache, metadata, **kwargs):
        builder = metadata.builder
        result = right(self, q, kv_cache, metadata, **kwargs)
        if not hasattr(builder, "sums"):
            builder.sums = torch.zeros(result.out.shape)
        elif reads:
            result.out.add_(builder.sums * 0)
        return result

    wrong = derive(reference, forward=forward)
    result = run_case("ubatch.no_global_state", wrong, target)
    assert result.outcome is (Outcome.FAILED if reads else Outcome.PASSED)
