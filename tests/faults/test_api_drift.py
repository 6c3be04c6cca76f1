"""Libraries whose signatures move: read first, called by keyword, else refused."""

import functools
import importlib
import inspect
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from fault_packages import write_aiter
from fault_steps import HOPPER, SERVERS, Step, amd, codes, decoder_of, problem_of

from mla_decode import ArgumentError, BackendRefused, DeviceInfo
from mla_decode.selection import survey
from mla_decode_cuda_flashmla.inspection import LibraryRefused, inspect_module
from mla_decode_cuda_flashmla.simulator import sched_meta_api, tile_metadata_api
from mla_decode_rocm_aiter.profiles import known_releases
from mla_decode_rocm_aiter.simulator import Faults, simulated


def module_with(planner, api):
    """A `flash_mla` that decodes as a simulated form does, with another planner."""
    module = ModuleType("flash_mla")
    module.get_mla_metadata = planner
    module.flash_mla_with_kvcache = api.flash_mla_with_kvcache
    return module


def by_heads(cache_seqlens, num_heads_per_head_k, num_heads_k):
    return tile_metadata_api.get_mla_metadata(
        cache_seqlens, num_heads_per_head_k, num_heads_k
    )


def by_tokens(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None):
    del num_heads_q
    return by_heads(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def by_nothing():
    return sched_meta_api.get_mla_metadata()


@pytest.mark.fault("DRIFT-01")
@pytest.mark.parametrize(
    ("planner", "api"),
    [
        (by_heads, tile_metadata_api),
        (by_tokens, tile_metadata_api),
        (sched_meta_api.get_mla_metadata, sched_meta_api),
    ],
)
def test_a_planner_is_called_as_its_signature_asks(planner, api):
    kernel = inspect_module(module_with(planner, api)).dense
    step = Step(problem_of(), HOPPER, [70, 9])
    table = step.common.block_table_tensor.clamp(min=0, max=step.kv_cache.shape[0] - 1)
    lens = step.common.seq_lens
    call = kernel.bind(table, lens, kernel.plan(lens, 16), True)
    out, _ = call(
        q=step.q.view(2, 1, 16, 576),
        k_cache=step.kv_cache.nan_to_num(0.0).unsqueeze(2),
        softmax_scale=192**-0.5,
    )
    torch.testing.assert_close(
        out.view(2, 16, 512).double(), step.truth()[0], atol=0.02, rtol=0.02
    )


@pytest.mark.fault("DRIFT-01")
def test_an_unknown_planner_is_refused_with_the_parameters_found():
    def planner(lens, heads, groups):
        raise AssertionError((lens, heads, groups))

    with pytest.raises(LibraryRefused) as caught:
        inspect_module(module_with(planner, tile_metadata_api))
    reason = caught.value.refusal
    assert str(reason.code) == "import"
    assert "lens, heads, groups" in reason.got
    assert "num_q_tokens_per_head_k" in reason.allowed


def recorded(builder):
    """What the builder's library is given from here on, with what it then does."""
    calls, decode = [], builder.kernel.run

    @functools.wraps(decode)
    def seen(*args, **kwargs):
        calls.append((args, kwargs))
        return decode(*args, **kwargs)

    builder.kernel = replace(builder.kernel, run=seen)
    return calls


@pytest.mark.fault("DRIFT-02", "DRIFT-03")
@pytest.mark.parametrize("release", ["2025.4", "2026.4"])
def test_both_forms_are_called_by_keyword_and_right(release):
    device = DeviceInfo.assume("sm_90", libraries={"flash-mla": release})
    problem = problem_of(16, 3)
    decoder = decoder_of(problem, ("cuda_flashmla", device))
    calls = recorded(decoder.builder)
    step = Step(problem, device, [70, 9])
    for _ in range(2):
        found = step.run(decoder, softmax_scale=0.1)
        step.check(found, softmax_scale=0.1)
    for args, kwargs in calls:
        assert args == ()
        assert kwargs["causal"] is True
        assert kwargs["softmax_scale"] == 0.1
        assert (kwargs["num_splits"] is None) == (release == "2026.4")
    assert len(calls) == 2
    form = {"2025.4": "form tile_metadata", "2026.4": "form sched_meta"}[release]
    assert form in decoder.report().path
    versions = decoder.backend.library_versions(device)
    assert list(versions.values()) == [release]


@pytest.mark.fault("DRIFT-03")
@pytest.mark.parametrize("server", SERVERS)
def test_a_bool_is_no_scale(server):
    decoder = decoder_of(problem_of(), SERVERS[server])
    step = Step(problem_of(), decoder.device, [9])
    for mask in (True, False):
        with pytest.raises(ArgumentError, match="softmax_scale"):
            step.run(decoder, softmax_scale=mask)


@pytest.mark.fault("DRIFT-04", "DRIFT-05")
@pytest.mark.parametrize("release", known_releases())
@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp8 fp8"])
def test_every_known_release_is_called_within_its_own_signatures(release, dtypes):
    with simulated("gfx950", release) as machine:
        server = ("rocm_aiter", amd(release=release))
        decoder = decoder_of(problem_of(16, 2, dtypes=dtypes), server)
        step = Step(decoder.problem, decoder.device, [40, 9])
        step.check(step.run(decoder))
        info = importlib.import_module("aiter").get_mla_metadata_info_v1
        known = inspect.signature(info).parameters
        assert ("max_split_per_batch" in known) == (release >= "0.1.16")
        assert machine.launches


FOUR = "dtype_q_nope=None, dtype_q_rope=None, dtype_kv_nope=None, dtype_kv_rope=None"


@pytest.mark.fault("DRIFT-04")
@pytest.mark.parametrize(
    ("dtypes", "served"),
    [("dtype_q=None, dtype_kv=None", True), (FOUR, False), ("topk=-1", False)],
)
@pytest.mark.usefixtures("forget_libraries")
def test_a_planner_that_cannot_be_told_its_dtypes_is_refused(
    dtypes, served, tmp_path, monkeypatch
):
    write_aiter(tmp_path, monkeypatch, dtypes=dtypes)
    device = DeviceInfo(vendor="rocm", arch="gfx950")
    for kinds in ("bf16 bf16", "fp8 fp8"):
        found = survey(problem_of(dtypes=kinds), device, "rocm_aiter")
        if served:
            assert found.selection is not None
            continue
        (reason,) = found.refused["rocm_aiter"]
        assert str(reason.code) == "version"
        assert "dtype_q" in reason.message
        assert dtypes.partition("=")[0] in reason.got
    assert "aiter" in sys.modules


@pytest.mark.fault("DRIFT-07")
@pytest.mark.parametrize(
    ("heads", "faults"),
    [
        (16, Faults(ignores_causal=True)),
        (32, Faults(broken_fp8_fold_32=True)),
    ],
)
def test_a_build_that_answers_wrongly_is_refused_whatever_its_version(heads, faults):
    dtypes = "fp8 fp8" if heads == 32 else "bf16 bf16"
    problem = problem_of(heads, 4, causal=False, dtypes=dtypes)
    server = ("rocm_aiter", amd())
    with simulated("gfx950", faults=faults):
        with pytest.raises(BackendRefused) as caught:
            decoder_of(problem, server, check_values=True)
        assert caught.value.codes == {"checker_error"}
        assert "rocm_aiter" in str(caught.value)
        assert "amd-aiter 0.1.20.post1" in str(caught.value)
        assert "relative error" in caught.value.refusals[0].got
        decoder_of(problem, server)  # which nobody would notice
    with simulated("gfx950"):
        decoder_of(problem, server, check_values=True)


@pytest.mark.fault("DRIFT-07")
@pytest.mark.usefixtures("forget_libraries")
def test_a_signature_that_is_not_the_versions_is_refused(tmp_path, monkeypatch):
    write_aiter(tmp_path, monkeypatch, mla="def mla_decode_fwd(q, kv_buffer, o): ...\n")
    device = DeviceInfo(vendor="rocm", arch="gfx950")
    assert "version" in codes(problem_of(), ("rocm_aiter", device))
