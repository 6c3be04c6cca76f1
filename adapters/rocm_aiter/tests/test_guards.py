"""What has no kernel is refused at construction, before a buffer is touched."""

import pytest
import torch
from aiter_steps import Step, device_of, problem_of, serve

import mla_decode_rocm_aiter
from mla_decode import BackendRefused, RefusalCode
from mla_decode.selection import survey
from mla_decode_rocm_aiter import (
    AITER_FP8_NON_CAUSAL_QLEN2_HEADS,
    AiterMLAHelper,
    backend,
    has_fp8_non_causal_qlen2_kernel,
)

PINNED = "0.1.21.post2"


def two_tokens(heads, dtypes="fp8 fp8"):
    return problem_of(heads, 2, causal=False, dtypes=dtypes)


@pytest.mark.parametrize("heads", [24, 32, 63, 64, 81, 96, 113, 128])
def test_two_token_fp8_blocks_that_pass_on_the_pinned_release(heads):
    assert backend.refusals(two_tokens(heads), device_of("gfx950", PINNED)) == []
    assert has_fp8_non_causal_qlen2_kernel(heads)


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 33, 48, 65, 80, 97, 112])
@pytest.mark.parametrize("release", ["0.1.20.post1", PINNED])
def test_two_token_fp8_blocks_that_do_not(heads, release):
    device = device_of("gfx950", release)
    (reason,) = backend.refusals(two_tokens(heads), device)
    padded = AiterMLAHelper.get_actual_mla_num_heads(heads)
    assert "2-token" in reason.message
    assert f"{padded} after padding" in reason.got
    assert reason.code is RefusalCode.QUERY_LEN
    assert not has_fp8_non_causal_qlen2_kernel(heads)


def test_96_heads_are_the_one_difference_between_the_two_releases():
    served = {
        release: [
            heads
            for heads in range(16, 129, 16)
            if not backend.refusals(two_tokens(heads), device_of("gfx950", release))
        ]
        for release in ("0.1.20.post1", PINNED)
    }
    assert served == {"0.1.20.post1": [32, 64, 128], PINNED: [32, 64, 96, 128]}


def test_the_list_is_derived_from_the_profile():
    assert AITER_FP8_NON_CAUSAL_QLEN2_HEADS == (32, 64, 96, 128)
    assert not has_fp8_non_causal_qlen2_kernel(96, "0.1.20.post1")
    assert has_fp8_non_causal_qlen2_kernel(24, "0.1.20.post1")


@pytest.mark.parametrize("heads", [12, 16, 48, 96])
def test_bf16_caches_are_not_affected(heads):
    serve(two_tokens(heads, "bf16 bf16"), device_of(), [10, 33], causal=False)


def test_96_heads_run_in_three_groups_on_the_pinned_release():
    builder, *_ = serve(
        two_tokens(96), device_of("gfx950", PINNED), [10, 33, 2], causal=False
    )
    (launch,) = builder.library.machine.launches
    assert (launch.key.heads, launch.key.fold) == (32, 3)


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16"])
def test_non_causal_fp16_is_refused_and_auto_goes_on(kv_dtype):
    problem = problem_of(
        16, 4, causal=False, dtypes=f"fp16 {kv_dtype}", out_dtype="fp16"
    )
    reasons = backend.refusals(problem, device_of())
    messages = [reason.message for reason in reasons]
    assert "non-causal fp16 MLA decode not supported" in messages
    found = survey(problem, device_of())
    assert found.outdated is None
    asked = {
        *found.refused,
        *([found.selection.backend.name] if found.selection else []),
    }
    assert asked == {"rocm_aiter", "triton_mla"}


def test_nothing_is_allocated_before_the_refusal(monkeypatch):
    def forbidden(*_args, **_kwargs):
        raise AssertionError("a buffer was made")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", forbidden)
        patch.setattr(torch, "empty", forbidden)
        with pytest.raises(BackendRefused, match="2-token"):
            backend.builder_cls(two_tokens(16), device_of())


def test_every_block_of_the_problem_is_asked_about():
    problem = problem_of(16, (2, 3, 4), causal=False, dtypes="fp8 fp8")
    (reason,) = backend.refusals(problem, device_of())
    assert "2-token" in reason.message


@pytest.mark.parametrize(("q", "word"), [(2, "2-token"), (7, "sized")])
def test_a_batch_outside_the_problem_is_refused_by_build_decode_too(q, word):
    problem = problem_of(16, 3, causal=False, dtypes="fp8 fp8")
    builder = backend.builder_cls(problem, device_of())
    before = builder._kv_indptr.clone()
    builder._decode_causal, builder._decode_query_len = False, q
    starts = torch.tensor([0, q], dtype=torch.int32)
    with pytest.raises(BackendRefused, match=word):
        builder._build_decode(
            block_table_tensor=torch.zeros(1, 4, dtype=torch.int32),
            seq_lens_device=torch.tensor([20], dtype=torch.int32),
            max_seq_len=20,
            query_start_loc_cpu=starts,
            query_start_loc_device=starts,
            num_decode_tokens=q,
            dcp_tot_seq_lens_device=None,
        )
    assert torch.equal(builder._kv_indptr, before)


def test_core_refuses_the_same_batch_before():
    problem = problem_of(16, 3, causal=False)
    builder = backend.builder_cls(problem, device_of())
    step = Step(problem, device_of(), [20], causal=False, q=5)
    with pytest.raises(BackendRefused):
        builder.build(step.common)


def test_index_lists_past_2_gib_are_refused():
    fits = problem_of(16, 1, max_num_reqs=2048, max_model_len=262_144)
    past = problem_of(16, 1, max_num_reqs=2049, max_model_len=262_144)
    assert backend.refusals(fits, device_of()) == []
    (reason,) = backend.refusals(past, device_of())
    assert reason.code is RefusalCode.FEATURE
    assert str(2049 * 262_144) in reason.got


def test_importing_the_backend_brings_neither_torch_kernels_nor_aiter():
    import subprocess
    import sys

    script = (
        "import sys, mla_decode_rocm_aiter\n"
        "assert mla_decode_rocm_aiter.backend.name == 'rocm_aiter'\n"
        "heavy = {'triton', 'aiter'} & set(sys.modules)\n"
        "sys.exit(f'{heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert mla_decode_rocm_aiter.backend is backend
