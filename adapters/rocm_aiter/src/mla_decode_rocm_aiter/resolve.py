"""Which kernel AITER takes for a call, or why it takes none. Pure, without AITER."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from mla_decode.refusal import Refusal, RefusalCode
from mla_decode_rocm_aiter.keys import KernelKey
from mla_decode_rocm_aiter.profiles import (
    find_profile,
    first_release_with_causal,
    known_releases,
)
from mla_decode_rocm_aiter.tables import ARCHS, packaged_tables

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.rules import Fold, KeyRule, Profile, Where
    from mla_decode_rocm_aiter.tables import KernelTable

DTYPES = frozenset({"bf16", "fp16", "fp8"})
_MAX_HEADS = 128
_Row = tuple[int, int, bool, int, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A release's rules, cut down to one arch, dtype pair, persistence and mask."""

    profile: Profile
    native: tuple[Where, ...]
    folds: tuple[Fold, ...]
    keys: tuple[KeyRule, ...]
    rows: dict[_Row, tuple[str, ...]]
    arch: str
    dtypes: tuple[str, str]
    persistent: bool
    causal: bool
    masked: Program | None
    """The same for causal calls; None where this is it."""
    by_heads: dict[
        int, tuple[tuple[Where, ...], tuple[Fold, ...], tuple[KeyRule, ...]]
    ] = field(default_factory=dict, compare=False, repr=False)
    """The rules that a head count can meet, filled as head counts are asked for."""

    def rules_of(
        self, heads: int
    ) -> tuple[tuple[Where, ...], tuple[Fold, ...], tuple[KeyRule, ...]]:
        """The native rules, folds and key rules that admit a head count."""
        found = self.by_heads.get(heads)
        if found is None:
            found = self.by_heads[heads] = (
                tuple(where for where in self.native if heads in where.heads),
                tuple(fold for fold in self.folds if heads in fold.where.heads),
                tuple(rule for rule in self.keys if heads in rule.where.heads),
            )
        return found


def rows_by_key(
    table: KernelTable, dtypes: tuple[str, str]
) -> dict[_Row, tuple[str, ...]]:
    """Kernels of a table by (gqa, qseqlen, persistent, causal, lse)."""
    found: dict[_Row, tuple[str, ...]] = {}
    for row in table.rows:
        if (row.q_dtype, row.kv_dtype) == dtypes and not row.round_robin:
            key = (row.gqa, row.qseqlen, row.persistent, row.causal, row.lse)
            found[key] = (*found.get(key, ()), row.kernel)
    return found


def compile_program(
    profile: Profile,
    table: KernelTable,
    dtypes: tuple[str, str],
    persistent: bool,
    causal: bool,
) -> Program:
    """Keep the rules and rows that a call of this kind can meet."""
    fixed = (table.arch, dtypes, persistent, causal)
    return Program(
        profile=profile,
        native=tuple(where for where in profile.native if where.fits(*fixed)),
        folds=tuple(fold for fold in profile.folds if fold.where.fits(*fixed)),
        keys=tuple(rule for rule in profile.keys if rule.where.fits(*fixed)),
        rows={
            key: kernels
            for key, kernels in rows_by_key(table, dtypes).items()
            if not any((table.arch, name) in profile.unloadable for name in kernels)
        },
        arch=table.arch,
        dtypes=dtypes,
        persistent=persistent,
        causal=causal,
        masked=None
        if causal
        else compile_program(profile, table, dtypes, persistent, True),
    )


@lru_cache(maxsize=1024)
def find_program(
    release: str, arch: str, dtypes: tuple[str, str], persistent: bool, causal: bool
) -> Program | None:
    """A release's rules for calls of one kind, or None for what nobody has read."""
    profile = find_profile(release)
    if profile is None or arch not in profile.tables:
        return None
    table = packaged_tables()[arch, profile.tables[arch]]
    return compile_program(profile, table, dtypes, persistent, causal)


def _fold(program: Program, heads: int, q: int) -> tuple[int, int, int] | str:
    """The Python side: groups that a request becomes, heads and tokens of each."""
    if not program.persistent:
        known = heads * q in program.profile.split_table_rows
        if program.dtypes[0] == "fp8" and not known:
            return "split_table"
        return "q_dtype" if program.dtypes[0] == "fp16" else (1, heads, q)
    found: tuple[int, int, int] | None = None
    native, folds, _ = program.rules_of(heads)
    if any(where.admits(heads, q) for where in native):
        found = (1, heads, q)
    else:
        for rule in folds:
            if rule.where.admits(heads, q):
                groups = heads // rule.to_heads
                tokens = q * groups if rule.into_query else q
                found = (groups, rule.to_heads, tokens)
                break
    if found is None:
        return "heads"
    return "q_dtype" if program.dtypes[0] == "fp16" else found


def _name(program: Program, heads: int, q: int) -> tuple[int, int, bool, int] | None:
    """The C++ side: gqa, qseqlen, persistent and causal of the key; None aborts."""
    causal = int(program.profile.has_causal_argument and (program.causal or q == 1))
    for key in program.rules_of(heads)[2]:
        if key.where.admits(heads, q):
            if key.aborts:
                return None
            return (
                heads if key.gqa is None else key.gqa,
                q if key.qseqlen is None else key.qseqlen,
                program.persistent if key.persistent is None else key.persistent,
                causal if key.causal is None else key.causal,
            )
    return heads, q, program.persistent, causal


def look_up(program: Program, heads: int, q: int, lse: bool) -> KernelKey | str:
    """Follow a call through the rules to a kernel, or to the word for why not.

    Returns:
        The key; or `heads` (the Python gate's assertion), `split_table` (its KeyError),
        `q_dtype`, `shape` (an abort before the lookup), `row` (no such kernel) or
        `reduce` (no reduction for the folded heads).
    """
    folded = _fold(program, heads, q)
    if isinstance(folded, str):
        return folded
    q_per_call = q
    fold, heads, q = folded
    named = _name(program, heads, q)
    if named is None:
        return "shape"
    gqa, qseqlen, persistent, causal = named
    with_lse = lse and (
        program.persistent or not program.profile.lse_key_needs_schedule
    )
    kernels = program.rows.get((gqa, qseqlen, persistent, causal, with_lse))
    if kernels is None:
        return "row"
    if program.persistent and heads not in program.profile.reduce_heads:
        return "reduce"
    return KernelKey(
        gqa=gqa,
        qseqlen=qseqlen,
        causal=causal,
        persistent=persistent,
        lse=with_lse,
        heads=heads,
        q=q,
        fold=fold,
        q_per_call=q_per_call,
        kernels=kernels,
    )


@lru_cache(maxsize=1 << 17)
def resolve(
    release: str,
    arch: str,
    num_heads: int,
    max_seqlen_q: int,
    q_dtype: str,
    kv_dtype: str,
    persistent: bool,
    causal: bool,
    lse: bool,
    page_size: int = 1,
) -> KernelKey | Refusal:
    """Name the kernel that an AITER release takes for a decode call.

    This is dispatch alone: a key means that the call reaches a kernel, not that the
    kernel's answer is right. `limits` holds what is refused beyond it.

    Args:
        release: An AITER release, as `0.1.20.post1`.
        arch: `gfx942` or `gfx950`.
        num_heads: Query heads of the call, as AITER gets them (padding done).
        max_seqlen_q: Query tokens per request.
        q_dtype: `bf16`, `fp16` or `fp8`.
        kv_dtype: The same, for the cache.
        persistent: Whether the call brings a schedule (`work_meta_data`).
        causal: The call's mask; before 0.1.20 AITER knows only True.
        lse: Whether the call asks for the log-sum-exp.
        page_size: Tokens per page; it never changes the kernel, only whether the
            answer is right.

    Returns:
        The key as the release's kernel table names it, or the reason why the call ends
        in an exception or ends the process.
    """
    del page_size
    if q_dtype not in DTYPES or kv_dtype not in DTYPES:
        return _refuse_dtype(release, q_dtype, kv_dtype)
    program = find_program(
        release, arch, (q_dtype, kv_dtype), bool(persistent), bool(causal)
    )
    if program is None:
        return _refuse_unknown(release, arch)
    return resolve_in(program, release, num_heads, max_seqlen_q, bool(lse))


def resolve_in(
    program: Program, release: str, num_heads: int, max_seqlen_q: int, lse: bool
) -> KernelKey | Refusal:
    """Resolve within a program: a release's rules over a kernel table of one's own."""
    if not 1 <= num_heads <= _MAX_HEADS:
        return Refusal(
            code=RefusalCode.NUM_HEADS,
            message="AITER has no MLA decode kernel for this head count",
            got=f"{num_heads} heads",
            allowed=f"1 to {_MAX_HEADS}",
            fix="raise or lower the tensor-parallel size",
        )
    if max_seqlen_q < 1:
        return Refusal(
            code=RefusalCode.QUERY_LEN,
            message="a decode block has at least one query token",
            got=f"{max_seqlen_q} tokens",
            allowed="1 and more",
            fix="pass the number of query tokens per request",
        )
    if not program.causal and not program.profile.has_causal_argument:
        return Refusal(
            code=RefusalCode.VERSION,
            message=f"mla_decode_fwd of AITER {release} takes no `causal` argument",
            got=f"AITER {release}",
            allowed=f"AITER {first_release_with_causal()} and newer",
            fix=f"upgrade AITER to {first_release_with_causal()}",
        )
    found = look_up(program, num_heads, max_seqlen_q, lse)
    if isinstance(found, KernelKey):
        return found
    return _explain(program, found, release, num_heads, max_seqlen_q, lse)


def _refuse_unknown(release: str, arch: str) -> Refusal:
    if find_profile(release) is None:
        return Refusal(
            code=RefusalCode.VERSION,
            message=f"nobody has read what AITER {release} does with an MLA decode call",
            got=f"AITER {release}",
            allowed=", ".join(known_releases()),
            fix="run `mla-decode probe rocm_aiter` on the GPU, or install a known release",
        )
    return Refusal(
        code=RefusalCode.ARCH,
        message="AITER's MLA decode is known for two archs only",
        got=arch,
        allowed=", ".join(ARCHS),
        fix="use triton_mla on this device",
    )


def _refuse_dtype(release: str, q_dtype: str, kv_dtype: str) -> Refusal:
    on_query = q_dtype not in DTYPES
    return Refusal(
        code=RefusalCode.DTYPE if on_query else RefusalCode.KV_DTYPE,
        message=f"AITER {release} has no MLA decode for this dtype",
        got=q_dtype if on_query else kv_dtype,
        allowed="bf16, fp8",
        fix="name the dtype as bf16, fp16 or fp8",
    )


def _asked(program: Program, heads: int, q: int, lse: bool) -> str:
    """The call in words."""
    return (
        f"{program.dtypes[0]} q, {program.dtypes[1]} cache, {heads} heads, {q} tokens, "
        f"{'causal' if program.causal else 'non-causal'}, "
        f"{'with' if program.persistent else 'without'} a schedule"
        f"{', with LSE' if lse else ''}"
    )


_TEXTS = {
    "heads": "mla_decode_fwd asserts: head count and block length not supported",
    "split_table": "mla_decode_fwd raises a KeyError: its table of fp8 split sizes lacks"
    " these heads times tokens",
    "q_dtype": "stage 1 ends the process: unsupported q dtype",
    "shape": "stage 1 ends the process: unsupported heads and tokens",
    "row": "stage 1 ends the process: the kernel table has no such row",
    "reduce": "the reduction ends the process or raises: unsupported head count",
}


def _explain(
    program: Program, why: str, release: str, heads: int, q: int, lse: bool
) -> Refusal:
    """Turn the word for a miss into a refusal that names the nearest way out."""
    code, fix = _nearest(program, why, heads, q, lse)
    return Refusal(
        code=code,
        message=f"AITER {release} on {program.arch}: {_TEXTS[why]}",
        got=_asked(program, heads, q, lse),
        allowed=f"a row of {program.arch}'s kernel table that this call resolves to",
        fix=fix,
    )


def _nearest(
    program: Program, why: str, heads: int, q: int, lse: bool
) -> tuple[RefusalCode, str]:
    """Which single change reaches a kernel: that is what the refusal is about."""
    if why == "q_dtype":
        return RefusalCode.DTYPE, "use a bf16 model, or triton_mla"
    if why in {"heads", "reduce"}:
        return RefusalCode.NUM_HEADS, "pad the heads to a multiple of 16"
    if lse and isinstance(look_up(program, heads, q, False), KernelKey):
        return RefusalCode.LSE, "do not ask for the LSE, or use another block length"
    if not program.rows:
        return RefusalCode.KV_DTYPE, "use a bf16 cache, or an fp8 query with it"
    if lse and program.persistent and not any(key[4] for key in program.rows):
        return RefusalCode.LSE, "do without the LSE, or use another pair of dtypes"
    if program.masked is not None and q > 1:
        longer = (look_up(program, heads, length, lse) for length in (2, 3, 4, 8))
        if any(isinstance(found, KernelKey) for found in longer):
            return RefusalCode.QUERY_LEN, "use lowering='exact', or triton_mla"
        if isinstance(look_up(program.masked, heads, q, lse), KernelKey):
            return RefusalCode.MASK, "use lowering='exact', or triton_mla"
    if isinstance(look_up(program, heads, 1, lse), KernelKey) or why == "split_table":
        return RefusalCode.QUERY_LEN, "use another block length, or lowering='exact'"
    return RefusalCode.NUM_HEADS, "pad the heads to a multiple of 16"
