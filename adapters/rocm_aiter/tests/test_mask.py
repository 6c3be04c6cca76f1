"""The mask reaches the schedule and the kernel, and is the same for both."""

import inspect
import sys
import types
from dataclasses import replace

import pytest
import torch
from aiter_steps import Step, device_of, problem_of, serve

from mla_decode import Mask, MaskError, OutdatedLibraryError
from mla_decode_rocm_aiter import AiterMLAMetadataBuilder, backend, ops
from mla_decode_rocm_aiter.library import load_library
from mla_decode_rocm_aiter.simulator import simulated

NAMES = ("q", "kv_buffer", "o", "max_seqlen_q", "sm_scale", "return_lse")


def watch(builder):
    """Every call that the builder's AITER gets, bound to its own signature."""
    calls = []

    def watched(function):
        signature = inspect.signature(function)

        def call(*args, **kwargs):
            calls.append((function.__name__, args, signature.bind(*args, **kwargs)))
            return function(*args, **kwargs)

        call.__signature__ = signature
        return call

    library = builder.library
    object.__setattr__(library, "decode", watched(library.decode))
    object.__setattr__(library, "build_metadata", watched(library.build_metadata))
    return calls


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [16, 24, 48])
def test_one_mask_reaches_schedule_and_kernel(heads, causal):
    device = device_of()
    problem = problem_of(heads, 8, causal=causal)
    builder = backend.builder_cls(problem, device)
    calls = watch(builder)
    step = Step(problem, device, [40, 9, 130], causal=causal)
    metadata, found = step.run(builder)
    (first, positional, schedule), (second, _, decode) = calls
    assert (first, second) == ("get_mla_metadata_v1", "mla_decode_fwd")
    assert positional[5] is causal
    assert schedule.arguments["is_causal"] is causal
    assert decode.arguments["causal"] is causal
    assert metadata.causal is builder._decode_causal is causal
    step.check(found)


def test_the_two_masks_differ_and_interleave_on_one_builder():
    device = device_of()
    problem = replace(problem_of(16, 4), masks=frozenset(Mask))
    builder = backend.builder_cls(problem, device)
    outs = []
    for causal in (True, False, True):
        step = Step(problem, device, [10, 77], causal=causal)
        _, found = step.run(builder)
        step.check(found)
        outs.append(found.out)
    assert torch.equal(outs[0], outs[2])
    assert not torch.allclose(outs[0].float(), outs[1].float(), atol=0.02)


@pytest.mark.parametrize("causal", [None, 0, torch.tensor([True, False])])
def test_a_flag_that_names_no_mask_is_refused(causal):
    device = device_of()
    problem = problem_of(16, 4)
    step = Step(problem, device, [10, 77])
    with pytest.raises(MaskError):
        backend.builder_cls(problem, device).build(replace(step.common, causal=causal))


@pytest.mark.parametrize("release", ["0.1.13", "0.1.16.post6", "0.1.19.post2"])
def test_a_causal_call_to_an_older_aiter_goes_without_the_argument(release):
    builder, metadata, _ = serve(
        problem_of(16, 4), device_of("gfx950", release), [20, 77]
    )
    assert not builder.library.has_causal
    assert metadata.causal


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_one_token_is_served_under_either_mask_by_an_older_aiter(arch):
    serve(
        problem_of(16, 1, causal=False),
        device_of(arch, "0.1.19.post2"),
        [20, 77],
        causal=False,
    )


def test_the_signature_of_build_decode_is_the_contracts():
    parameters = list(
        inspect.signature(AiterMLAMetadataBuilder._build_decode).parameters
    )
    assert parameters[1:] == [
        "block_table_tensor",
        "seq_lens_device",
        "max_seq_len",
        "query_start_loc_cpu",
        "query_start_loc_device",
        "num_decode_tokens",
        "dcp_tot_seq_lens_device",
    ]


def fake_aiter(monkeypatch, decode):
    """An AITER of two functions, as engines' own tests make one."""
    root, mla = types.ModuleType("aiter"), types.ModuleType("aiter.mla")
    mla.mla_decode_fwd, root.mla = decode, mla
    monkeypatch.setitem(sys.modules, "aiter", root)
    monkeypatch.setitem(sys.modules, "aiter.mla", mla)


def call_op(**words):
    x = torch.zeros(1)
    return ops.mla_decode_fwd(x, x, x, x, x, x, x, 2, sm_scale=1.0, **words)


def test_the_op_forwards_the_mask_and_defaults_to_causal(monkeypatch):
    seen = []

    def decode(q, causal=True, **_):
        seen.append(causal)
        return q, None

    fake_aiter(monkeypatch, decode)
    assert ops.mla_decode_supports_non_causal()
    call_op()
    call_op(causal=False)
    assert seen == [True, False]
    assert inspect.signature(ops.mla_decode_fwd).parameters["causal"].default is True


def test_the_op_fails_closed_without_the_argument(monkeypatch):
    seen = []

    def decode(q, **words):
        seen.append(words)
        return q, None

    decode.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in NAMES]
    )
    fake_aiter(monkeypatch, decode)
    with pytest.raises(OutdatedLibraryError, match=r"0\.1\.20"):
        ops.mla_decode_supports_non_causal()
    with pytest.raises(OutdatedLibraryError):
        call_op(causal=False)
    assert seen == []
    call_op()
    assert len(seen) == 1
    assert "causal" not in seen[0]


def test_the_library_of_an_installed_simulation_is_used():
    with simulated("gfx950", cus=9) as machine:
        library = load_library(device_of())
        assert library.machine is machine
        assert library.cus == 9
        assert load_library(device_of("gfx942")).machine is not machine
