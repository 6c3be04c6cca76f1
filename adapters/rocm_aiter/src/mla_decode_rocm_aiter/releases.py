"""What each known AITER release does with a call: the data behind `resolve`.

Read from `aiter/mla.py` (the Python gate and its folds), `csrc/py_itfs_cu/asm_mla.cu`
(the names of kernels) and `csrc/kernels/mla` (schedule and reduction) at each tag of
github.com/ROCm/aiter. Releases whose three sources agree share a profile. Each profile
is written as what changed since the one before it.
"""

from __future__ import annotations

from dataclasses import replace

from mla_decode_rocm_aiter.rules import (
    BF16,
    FP8,
    MIXED,
    Fold,
    KeyRule,
    Profile,
    Where,
    at_least,
    only,
)

_TAGS = "github.com/ROCm/aiter at the release's tag"
_FOLD_TO_16 = Fold(where=Where(heads=range(32, 129, 16)), to_heads=16)
_NOT_48 = frozenset(range(1, 129)) - {48}

# The gate in front of the kernels: persistent calls that keep their heads.
_ALWAYS_NATIVE = (
    Where(heads=only(16)),
    Where(arch="gfx942", dtypes=FP8, heads=only(128)),
    Where(arch="gfx942", dtypes=BF16, heads=only(8), q=only(2)),
    Where(arch="gfx950", dtypes=FP8, heads=only(8), q=only(4)),
)

# Names of kernels that no release changed.
_ANY_128 = (
    KeyRule(
        where=Where(arch="gfx942", dtypes=BF16, heads=only(128)),
        qseqlen=0,
        persistent=False,
    ),
    KeyRule(where=Where(heads=only(128)), qseqlen=0),
)
_BF16_16_AND_64 = (
    KeyRule(
        where=Where(dtypes=BF16, persistent=True, heads=only(16), q=range(1, 5)),
        qseqlen=4,
    ),
    KeyRule(
        where=Where(dtypes=BF16, persistent=False, heads=only(16), q=range(2, 5)),
        qseqlen=4,
    ),
    KeyRule(
        where=Where(dtypes=BF16, persistent=False, heads=only(16), q=at_least(5)),
        qseqlen=8,
    ),
    KeyRule(
        where=Where(dtypes=MIXED, persistent=True, heads=only(16), q=range(1, 5)),
        qseqlen=4,
    ),
    KeyRule(where=Where(dtypes=BF16, persistent=False, heads=only(32)), qseqlen=0),
    KeyRule(
        where=Where(dtypes=BF16, persistent=False, heads=only(64), q=at_least(2)),
        qseqlen=0,
    ),
)
_FP8_16 = KeyRule(where=Where(dtypes=FP8, heads=only(16), q=only(3, 4)), qseqlen=4)
_FP8_16_LONG_ABORTS = KeyRule(
    where=Where(dtypes=FP8, heads=only(16), q=at_least(5)), aborts=True
)
_FP8_64_UNSCHEDULED_ABORTS = KeyRule(
    where=Where(dtypes=FP8, persistent=False, heads=only(64)), aborts=True
)


def _fp8_32(*, scheduled: tuple[KeyRule, ...]) -> tuple[KeyRule, ...]:
    """fp8 with 32 heads: the named calls, and an abort for every other."""
    return (
        *scheduled,
        KeyRule(where=Where(dtypes=FP8, heads=only(32)), aborts=True),
    )


def _wide_950(*, heads: frozenset[int], q: range) -> KeyRule:
    """gfx950 fp8 calls that run on the kernel of 32 heads and 4 tokens."""
    return KeyRule(
        where=Where(arch="gfx950", dtypes=FP8, persistent=True, heads=heads, q=q),
        gqa=32,
        qseqlen=4,
    )


_BF16_950_TO_32 = (
    KeyRule(
        where=Where(
            arch="gfx950",
            dtypes=BF16,
            persistent=True,
            heads=_NOT_48,
            rows=at_least(128),
        ),
        gqa=32,
        qseqlen=4,
    ),
    KeyRule(
        where=Where(arch="gfx950", dtypes=BF16, persistent=True, heads=range(65, 129)),
        gqa=32,
        qseqlen=4,
    ),
)


def _bf16_950_to_64(*, heads: range, rows: range = at_least(1)) -> KeyRule:
    """gfx950 bf16 calls that run on the kernel of 64 heads and 1 token."""
    return KeyRule(
        where=Where(
            arch="gfx950", dtypes=BF16, persistent=True, heads=heads, rows=rows
        ),
        gqa=64,
        qseqlen=1,
    )


V0_1_13 = Profile(
    releases=("0.1.13", "0.1.13.post1"),
    evidence="executed",
    source=_TAGS,
    tables={"gfx942": "0.1.13", "gfx950": "0.1.13"},
    has_causal_argument=False,
    lse_key_needs_schedule=False,
    reduce_heads=only(8, 16, 32, 64, 128),
    split_table_rows=only(16, 32, 48, 64, 128, 256, 384, 512),
    native=(
        *_ALWAYS_NATIVE,
        Where(arch="gfx950", dtypes=FP8, heads=only(32), q=only(2, 4)),
        Where(arch="gfx950", dtypes=FP8, heads=only(64), q=only(1)),
        Where(arch="gfx950", dtypes=BF16, rows=range(128, 1 << 30, 128)),
    ),
    folds=(
        Fold(
            where=Where(arch="gfx950", dtypes=FP8, heads=only(64), q=only(2)),
            to_heads=32,
            into_query=True,
        ),
        _FOLD_TO_16,
    ),
    keys=(
        KeyRule(
            where=Where(
                arch="gfx950",
                dtypes=BF16,
                persistent=True,
                rows=range(128, 1 << 30, 128),
            ),
            gqa=32,
            qseqlen=4,
        ),
        *_ANY_128,
        *_BF16_16_AND_64,
        _FP8_16,
        _FP8_16_LONG_ABORTS,
        *_fp8_32(
            scheduled=(
                KeyRule(
                    where=Where(
                        dtypes=FP8, persistent=True, heads=only(32), q=only(2, 4)
                    )
                ),
            )
        ),
        _FP8_64_UNSCHEDULED_ABORTS,
        KeyRule(where=Where(dtypes=FP8, heads=only(64), q=at_least(2)), aborts=True),
    ),
)

_KEYS_0_1_14 = (
    *_BF16_950_TO_32,
    _bf16_950_to_64(heads=range(17, 129)),
    _bf16_950_to_64(heads=range(1, 129), rows=at_least(64)),
    KeyRule(where=Where(dtypes=BF16, persistent=False, heads=only(8)), qseqlen=1),
    *V0_1_13.keys[1:],
)

V0_1_14 = replace(
    V0_1_13,
    releases=("0.1.14",),
    evidence="read",
    tables={"gfx942": "0.1.14", "gfx950": "0.1.14"},
    reduce_heads=only(8, 16, 32, 48, 64, 80, 96, 112, 128),
    split_table_rows=V0_1_13.split_table_rows | {8},
    native=(
        *_ALWAYS_NATIVE,
        Where(arch="gfx950", dtypes=FP8, heads=only(128)),
        Where(arch="gfx950", dtypes=FP8, heads=only(32), q=only(2, 4)),
        Where(arch="gfx950", dtypes=FP8, heads=only(64), q=only(1)),
        Where(arch="gfx950", dtypes=BF16),
    ),
    keys=_KEYS_0_1_14,
    # The object wants 160 KiB of LDS, gfx942 has 64 KiB.
    unloadable=frozenset({("gfx942", "mla_a16w16_qh8_qseqlen1_gqaratio8_v3")}),
)

_FP8_32_ONE_TOKEN = KeyRule(
    where=Where(dtypes=FP8, persistent=True, heads=only(32), q=only(1))
)

V0_1_14_POST1 = replace(
    V0_1_14,
    releases=("0.1.14.post1",),
    evidence="executed",
    tables={"gfx942": "0.1.14", "gfx950": "0.1.14.post1"},
    native=(
        *V0_1_14.native,
        Where(arch="gfx950", dtypes=FP8, heads=only(32), q=only(1)),
    ),
    keys=(_FP8_32_ONE_TOKEN, *_KEYS_0_1_14),
)

V0_1_15 = replace(
    V0_1_14_POST1,
    releases=("0.1.15", "0.1.15.post1", "0.1.15.post2", "0.1.15.post3"),
    evidence="read",
    tables={"gfx942": "0.1.15", "gfx950": "0.1.15"},
    native=(
        *_ALWAYS_NATIVE,
        Where(
            arch="gfx950",
            dtypes=FP8,
            heads=only(128),
            q=frozenset(range(1, 1025)) - {4},
        ),
        Where(arch="gfx950", dtypes=FP8, heads=only(32), q=only(1, 2, 4)),
        Where(arch="gfx950", dtypes=FP8, heads=only(64), q=only(1)),
        Where(arch="gfx950", dtypes=BF16),
    ),
    keys=(
        # The one place where a release before 0.1.20 asks for a causal row.
        KeyRule(
            where=Where(arch="gfx950", dtypes=FP8, heads=only(128), q=at_least(2)),
            qseqlen=0,
            causal=1,
        ),
        KeyRule(
            where=Where(
                arch="gfx950",
                dtypes=BF16,
                persistent=True,
                heads=only(32),
                q=range(1, 4),
            ),
            qseqlen=4,
        ),
        KeyRule(
            where=Where(
                arch="gfx942",
                dtypes=BF16,
                persistent=True,
                heads=only(32),
                q=range(1, 5),
            ),
            qseqlen=4,
        ),
        *V0_1_14_POST1.keys,
    ),
    unloadable=frozenset(),
)

_BF16_8_UNSCHEDULED = KeyRule(
    where=Where(dtypes=BF16, persistent=False, heads=only(8)), qseqlen=1
)
_FP8_64_BLOCKS = KeyRule(
    where=Where(dtypes=FP8, persistent=True, heads=only(64), q=at_least(2)), qseqlen=4
)

V0_1_16 = replace(
    V0_1_15,
    releases=("0.1.16", "0.1.16.post1", "0.1.16.post2", "0.1.16.post3"),
    evidence="executed",
    tables={"gfx942": "0.1.15", "gfx950": "0.1.16"},
    native=(
        *_ALWAYS_NATIVE,
        Where(arch="gfx950", dtypes=FP8, heads=only(64, 128)),
        Where(arch="gfx950", dtypes=FP8, heads=only(32), q=only(2, 4)),
        Where(arch="gfx950", dtypes=BF16),
    ),
    folds=(_FOLD_TO_16,),
    keys=(
        *_BF16_950_TO_32,
        KeyRule(
            where=Where(dtypes=BF16, persistent=True, heads=only(32), q=only(1)),
            qseqlen=4,
        ),
        _bf16_950_to_64(heads=range(17, 129)),
        _bf16_950_to_64(heads=range(1, 129), rows=at_least(64)),
        _wide_950(heads=only(32), q=range(4, 5)),
        _wide_950(heads=only(64), q=range(2, 5)),
        _wide_950(heads=only(128), q=at_least(1)),
        *_ANY_128,
        *_BF16_16_AND_64,
        _BF16_8_UNSCHEDULED,
        _FP8_16,
        _FP8_16_LONG_ABORTS,
        *_fp8_32(
            scheduled=(
                KeyRule(
                    where=Where(
                        dtypes=FP8, persistent=True, heads=only(32), q=only(2, 4)
                    )
                ),
            )
        ),
        _FP8_64_UNSCHEDULED_ABORTS,
        _FP8_64_BLOCKS,
    ),
)

V0_1_16_POST4 = replace(
    V0_1_16,
    releases=("0.1.16.post4", "0.1.16.post5", "0.1.16.post6"),
    parallel_planner=True,
)

V0_1_17 = replace(
    V0_1_16,
    releases=("0.1.17",),
    evidence="read",
    tables={"gfx942": "0.1.15", "gfx950": "0.1.17"},
    split_table_rows=V0_1_16.split_table_rows | {24},
    native=(
        *_ALWAYS_NATIVE,
        Where(arch="gfx950", dtypes=FP8, heads=only(64, 128)),
        Where(arch="gfx950", dtypes=FP8, heads=only(32), q=only(1, 2, 4)),
        Where(arch="gfx950", dtypes=BF16),
    ),
    keys=(
        *_BF16_950_TO_32,
        _bf16_950_to_64(heads=range(16, 129)),
        _bf16_950_to_64(heads=range(1, 129), rows=at_least(64)),
        _wide_950(heads=only(32), q=range(4, 5)),
        _wide_950(heads=only(64), q=range(2, 5)),
        _wide_950(heads=only(128), q=at_least(1)),
        *_ANY_128,
        *_BF16_16_AND_64,
        _FP8_16,
        _FP8_16_LONG_ABORTS,
        *_fp8_32(
            scheduled=(
                KeyRule(
                    where=Where(
                        dtypes=FP8, persistent=True, heads=only(32), q=only(1, 2, 4)
                    )
                ),
                KeyRule(
                    where=Where(dtypes=FP8, persistent=False, heads=only(32), q=only(1))
                ),
            )
        ),
        _FP8_64_UNSCHEDULED_ABORTS,
        _FP8_64_BLOCKS,
    ),
    parallel_planner=True,
)

_KEYS_0_1_18 = (
    *_BF16_950_TO_32,
    _bf16_950_to_64(heads=range(16, 129)),
    _bf16_950_to_64(heads=range(1, 129), rows=at_least(64)),
    _wide_950(heads=only(16), q=at_least(5)),
    _wide_950(heads=only(32), q=at_least(4)),
    _wide_950(heads=only(64), q=at_least(2)),
    _wide_950(heads=only(128), q=at_least(1)),
    *_ANY_128,
    *_BF16_16_AND_64,
    _FP8_16,
    _FP8_16_LONG_ABORTS,
    *_fp8_32(
        scheduled=(
            KeyRule(
                where=Where(dtypes=FP8, persistent=True, heads=only(32), q=only(1, 2))
            ),
            KeyRule(
                where=Where(dtypes=FP8, persistent=False, heads=only(32), q=only(1))
            ),
        )
    ),
    _FP8_64_UNSCHEDULED_ABORTS,
    _FP8_64_BLOCKS,
)

V0_1_18 = replace(
    V0_1_17,
    releases=("0.1.18", "0.1.17-longctx"),
    evidence="executed",
    tables={"gfx942": "0.1.18", "gfx950": "0.1.17"},
    native=(
        *_ALWAYS_NATIVE,
        Where(arch="gfx950", dtypes=FP8, heads=only(64, 128)),
        Where(
            arch="gfx950",
            dtypes=FP8,
            heads=only(32),
            q=frozenset(range(1, 1025)) - {3},
        ),
        Where(arch="gfx942", dtypes=FP8, heads=only(64), q=only(1)),
        Where(arch="gfx950", dtypes=BF16),
    ),
    keys=_KEYS_0_1_18,
    batch_gate=32,
    aborts=frozenset({"stage1", "reduce"}),
)

V0_1_19 = replace(
    V0_1_18,
    releases=("0.1.19", "0.1.19.post1", "0.1.19.post2"),
    tables={"gfx942": "0.1.18", "gfx950": "0.1.19"},
    lse_key_needs_schedule=True,
)


def _narrow_950(*, heads: int, q: frozenset[int]) -> KeyRule:
    """gfx950 fp8 calls that run on the kernel of 16 heads and 4 tokens."""
    return KeyRule(
        where=Where(arch="gfx950", dtypes=FP8, persistent=True, heads=only(heads), q=q),
        gqa=16,
        qseqlen=4,
    )


V0_1_20 = replace(
    V0_1_19,
    releases=("0.1.20", "0.1.20.post1", "2026-08-22", "head"),
    tables={"gfx942": "0.1.20", "gfx950": "0.1.20"},
    has_causal_argument=True,
    reduce_heads=V0_1_19.reduce_heads | {24},
    native=(
        *_ALWAYS_NATIVE,
        Where(arch="gfx950", dtypes=FP8, heads=only(32, 64, 128)),
        Where(arch="gfx942", dtypes=FP8, heads=only(64), q=only(1)),
        Where(arch="gfx950", dtypes=BF16),
    ),
    keys=(
        _narrow_950(heads=16, q=only(3, 4)),
        _narrow_950(heads=32, q=only(2, 3)),
        _narrow_950(heads=64, q=only(1)),
        *_KEYS_0_1_18,
    ),
    experimental_breaks=True,
    aborts=frozenset({"stage1", "metadata", "reduce"}),
)

# Known only through the head counts that engines admit for fp8 blocks of two tokens:
# 96 heads, three groups of 32, run there and end the process in 0.1.20.post1.
V0_1_21_POST2 = replace(
    V0_1_20,
    releases=("0.1.21.post2",),
    evidence="declared",
    source="the engines' list of head counts for fp8 non-causal blocks of two tokens"
    " (32, 64, 96, 128), over the facts of 0.1.20.post1",
    folds=(
        Fold(
            where=Where(
                arch="gfx950",
                dtypes=FP8,
                causal=False,
                heads=only(96),
                q=only(2),
            ),
            to_heads=32,
        ),
        *V0_1_20.folds,
    ),
)

PROFILES = (
    V0_1_13,
    V0_1_14,
    V0_1_14_POST1,
    V0_1_15,
    V0_1_16,
    V0_1_16_POST4,
    V0_1_17,
    V0_1_18,
    V0_1_19,
    V0_1_20,
    V0_1_21_POST2,
)
"""Every profile, oldest first."""
