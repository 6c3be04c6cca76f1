import gc
import sys
import time

import pytest
from aiter_dispatch_rows import RELEASES, read_rows

from mla_decode import Refusal, RefusalCode
from mla_decode_rocm_aiter import KernelKey, known_releases, resolve


def ask(release, arch, heads, q, dtypes="fp8 fp8", **call):
    q_dtype, kv_dtype = dtypes.split()
    given = {"persistent": True, "causal": True, "lse": False} | call
    return resolve(release, arch, heads, q, q_dtype, kv_dtype, **given)


@pytest.mark.parametrize("release", RELEASES)
def test_agrees_with_aiter_on_every_recorded_call(release):
    rows = accepted = 0
    disagreements = []
    for row in read_rows(release):
        found = resolve(
            row.release,
            row.arch,
            row.heads,
            row.q,
            row.q_dtype,
            row.kv_dtype,
            row.persistent,
            row.causal,
            row.lse,
        )
        key = None
        if isinstance(found, KernelKey):
            key = (found.gqa, found.qseqlen, found.causal)
            accepted += 1
        rows += 1
        if key != row.key:
            disagreements.append((row, found))
    sys.stdout.write(
        f"{release}: {rows} rows, {accepted} kernels, {len(disagreements)} wrong\n"
    )
    assert disagreements == []
    assert rows == 19_200
    assert accepted > 380


@pytest.mark.parametrize("release", known_releases())
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_answers_every_shape(release, arch):
    dtypes = ["bf16 bf16", "bf16 fp8", "fp8 fp8"]
    kernels = 0
    for heads in range(1, 129):
        for q in (1, 2, 3, 4, 5, 8, 9, 16, 33, 64):
            for pair in dtypes:
                for persistent in (True, False):
                    found = ask(release, arch, heads, q, pair, persistent=persistent)
                    assert isinstance(found, KernelKey | Refusal)
                    kernels += isinstance(found, KernelKey)
    assert kernels > 100


def test_one_call_takes_less_than_20_microseconds():
    calls = [(heads, q) for heads in range(1, 129) for q in range(1, 65)]
    spent = []
    gc.disable()  # a collection of the whole session's objects is not the call's
    try:
        for _ in range(5):
            resolve.cache_clear()
            started = time.process_time()
            for heads, q in calls:
                ask("0.1.20.post1", "gfx950", heads, q, causal=False, lse=True)
            spent.append(time.process_time() - started)
    finally:
        gc.enable()
    assert min(spent) / len(calls) < 20e-6


def test_a_release_that_nobody_read_is_refused_with_the_probe():
    found = ask("0.1.22", "gfx950", 16, 1)
    assert found.code is RefusalCode.VERSION
    assert "mla-decode probe rocm_aiter" in found.fix


@pytest.mark.parametrize("name", ["0.1.20.dev3", "0.1.21rc1", "main", "0.1.12.post2"])
def test_a_pre_release_is_not_its_release(name):
    assert ask(name, "gfx950", 16, 1).code is RefusalCode.VERSION


@pytest.mark.parametrize("name", ["v0.1.20.post1", "0.1.20.post1+rocm7.2", "head"])
def test_a_release_has_other_spellings(name):
    assert ask(name, "gfx950", 16, 1) == ask("0.1.20.post1", "gfx950", 16, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("0.1.16", "0.1.16.post6"),
        ("0.1.13", "0.1.13.post1"),
        ("0.1.15", "0.1.15.post3"),
        ("0.1.20", "2026-08-22"),
    ],
)
def test_equal_releases_share_their_answers(first, second):
    for heads in range(8, 129, 8):
        for q in range(1, 9):
            one, two = (ask(name, "gfx950", heads, q) for name in (first, second))
            assert isinstance(one, KernelKey) == isinstance(two, KernelKey)
            if isinstance(one, KernelKey):
                assert one == two


@pytest.mark.parametrize(
    ("heads", "at_20", "at_21"),
    [
        (16, False, False),
        (32, True, True),
        (48, False, False),
        (64, True, True),
        (80, False, False),
        (96, False, True),
        (112, False, False),
        (128, True, True),
    ],
)
def test_two_token_fp8_blocks_move_at_0_1_21_post2(heads, at_20, at_21):
    for release, runs in (("0.1.20.post1", at_20), ("0.1.21.post2", at_21)):
        found = ask(release, "gfx950", heads, 2, causal=False)
        assert isinstance(found, KernelKey) is runs
        if runs:
            assert found.causal == 0


def test_96_heads_fold_to_three_groups_of_32_at_0_1_21_post2():
    found = ask("0.1.21.post2", "gfx950", 96, 2, causal=False)
    assert (found.gqa, found.qseqlen, found.heads, found.fold) == (16, 4, 32, 3)


def test_the_overlay_changes_nothing_else():
    for heads in range(1, 129):
        for q in range(1, 17):
            for causal in (True, False):
                if (heads, q, causal) == (96, 2, False):
                    continue
                one, two = (
                    ask(release, "gfx950", heads, q, causal=causal)
                    for release in ("0.1.20.post1", "0.1.21.post2")
                )
                assert isinstance(one, KernelKey) == isinstance(two, KernelKey)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_one_token_never_needs_a_non_causal_kernel(arch):
    for heads in range(16, 129, 16):
        call = ("0.1.20.post1", arch, heads, 1, "bf16 bf16")
        assert ask(*call, causal=False) == ask(*call, causal=True)


def test_no_block_is_non_causal_on_gfx942():
    for heads in range(1, 129):
        for q in range(2, 17):
            for pair in ("bf16 bf16", "fp8 fp8", "bf16 fp8"):
                for persistent in (True, False):
                    found = ask(
                        "0.1.20.post1",
                        "gfx942",
                        heads,
                        q,
                        pair,
                        causal=False,
                        persistent=persistent,
                    )
                    assert isinstance(found, Refusal)


@pytest.mark.parametrize("heads", [16, 48, 80, 96, 112])
def test_causal_two_token_fp8_with_lse_has_no_kernel(heads):
    assert isinstance(ask("0.1.20.post1", "gfx950", heads, 2), KernelKey)
    found = ask("0.1.20.post1", "gfx950", heads, 2, lse=True)
    assert found.code is RefusalCode.LSE


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (("0.1.20.post1", "gfx1250", 16, 1), RefusalCode.ARCH),
        (("0.1.20.post1", "gfx950", 129, 1), RefusalCode.NUM_HEADS),
        (("0.1.20.post1", "gfx950", 0, 1), RefusalCode.NUM_HEADS),
        (("0.1.20.post1", "gfx950", 16, 0), RefusalCode.QUERY_LEN),
        (("0.1.20.post1", "gfx950", 16, 1, "fp16 fp16"), RefusalCode.DTYPE),
        (("0.1.20.post1", "gfx950", 16, 1, "fp32 bf16"), RefusalCode.DTYPE),
        (("0.1.20.post1", "gfx950", 16, 1, "bf16 fp4"), RefusalCode.KV_DTYPE),
        (("0.1.20.post1", "gfx950", 33, 1), RefusalCode.NUM_HEADS),
        (("0.1.20.post1", "gfx950", 16, 5, "bf16 fp8"), RefusalCode.QUERY_LEN),
    ],
)
def test_names_what_is_wrong(call, code):
    assert ask(*call).code is code


def test_a_mask_before_0_1_20_is_refused_with_the_release_that_has_it():
    found = ask("0.1.19.post2", "gfx950", 16, 4, causal=False)
    assert found.code is RefusalCode.VERSION
    assert "0.1.20" in found.fix


def test_refuses_a_block_length_between_two_that_have_kernels():
    found = ask("0.1.20.post1", "gfx950", 16, 2, causal=False)
    assert found.code is RefusalCode.QUERY_LEN


def test_refuses_a_block_whose_only_kernels_mask():
    found = ask("0.1.20.post1", "gfx942", 16, 2, causal=False)
    assert found.code is RefusalCode.MASK


def test_knows_the_kernels_that_the_build_chooses_between():
    found = ask("0.1.20.post1", "gfx950", 8, 2, "bf16 bf16", persistent=False)
    assert found.kernels == (
        "mla_a16w16_qh8_qseqlen2_gqaratio8",
        "mla_a16w16_qh8_qseqlen2_gqaratio8_causal",
    )


def test_an_object_that_gfx942_cannot_launch_is_no_kernel():
    call = ("gfx942", 8, 1, "bf16 bf16")
    assert isinstance(ask("0.1.14", *call, persistent=False), Refusal)
    assert isinstance(ask("0.1.16", *call, persistent=False), KernelKey)
