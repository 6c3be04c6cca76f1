"""What is refused although AITER would dispatch it: answers that would be wrong."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from mla_decode import Mask, Refusal, RefusalCode
from mla_decode_rocm_aiter.tiling import loses_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode_rocm_aiter.facts import Facts
    from mla_decode_rocm_aiter.keys import KernelKey

_EXACT = "use another block length, lowering='exact', or triton_mla"
_EXPERIMENTAL, _OPUS = "AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_USE_OPUS"


class LeavingVariables(NamedTuple):
    """The variables that make AITER leave its kernel table, at one moment."""

    experimental: str = ""
    """The value of AITER_ENABLE_EXPERIMENTAL; empty where unset or 0."""
    opus: str = ""
    """That of AITER_MLA_USE_OPUS."""

    @classmethod
    def read(cls) -> LeavingVariables:
        """What the environment says now."""
        return cls(_value(_EXPERIMENTAL), _value(_OPUS))


def kernel_limits(
    facts: Facts,
    key: KernelKey,
    dtypes: tuple[str, str],
    mask: Mask,
    *,
    persistent: bool,
    variables: LeavingVariables,
) -> list[Refusal]:
    """Every reason not to trust a kernel that a call does reach."""
    causal = mask is Mask.CAUSAL
    if persistent:
        return [
            *_lost_keys(key, causal=causal),
            *_folded_tokens(key, causal=causal),
            *_other_kernels(facts, key, dtypes, variables),
        ]
    return list(_unscheduled(facts, key, dtypes))


def _lost_keys(key: KernelKey, *, causal: bool) -> Iterator[Refusal]:
    ratio = key.fold if key.q_per_call == key.q else 1
    if causal and loses_keys(key.heads, key.q, ratio):
        yield Refusal(
            code=RefusalCode.QUERY_LEN,
            message="AITER's schedule of folded heads hides a key from the last rows "
            "of a tile of this causal block",
            got=f"{key.heads * ratio} heads in {ratio} groups, {key.q} tokens",
            allowed="up to 8 tokens, or heads that do not fold",
            fix=_EXACT,
        )


def _folded_tokens(key: KernelKey, *, causal: bool) -> Iterator[Refusal]:
    if causal and key.q_per_call > 1 and key.q != key.q_per_call:
        yield Refusal(
            code=RefusalCode.QUERY_LEN,
            message="this release makes further query tokens of folded heads, and "
            "nobody knows how its kernel masks them",
            got=f"{key.q_per_call} tokens as {key.q}",
            allowed="one token, or a release from 0.1.16 on",
            fix="upgrade AITER, or use lowering='exact'",
        )


def _other_kernels(
    facts: Facts, key: KernelKey, dtypes: tuple[str, str], variables: LeavingVariables
) -> Iterator[Refusal]:
    """Variables that make AITER leave its kernel table."""
    if dtypes != ("fp8", "fp8"):
        return
    rows = {128, 64} if facts.arch == "gfx950" else {128}
    if variables.experimental and key.heads * key.q in rows:
        yield _variable(_EXPERIMENTAL, variables.experimental, key)
    if facts.arch == "gfx950" and variables.opus and facts.has_causal:
        yield _variable(_OPUS, variables.opus, key)


def _value(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    return "" if value == "0" else value


def _variable(name: str, value: str, key: KernelKey) -> Refusal:
    return Refusal(
        code=RefusalCode.FEATURE,
        message=f"{name} makes AITER leave its kernel table for kernels that nobody "
        "has read, or that are not there",
        got=f"{name}={value}, {key.heads} heads, {key.q} tokens",
        allowed=f"{name} unset or 0",
        fix=f"unset {name}",
    )


def _unscheduled(
    facts: Facts, key: KernelKey, dtypes: tuple[str, str]
) -> Iterator[Refusal]:
    if key.q & (key.q - 1):
        yield Refusal(
            code=RefusalCode.QUERY_LEN,
            message="without a schedule AITER gives every token of this block the same "
            "answer: its kernels take blocks of 1, 2, 4, 8 and 16 tokens",
            got=f"{key.q} tokens",
            allowed="a power of two",
            fix=_EXACT,
        )
    if facts.arch == "gfx950" and dtypes == ("bf16", "bf16") and key.heads == 32:
        yield Refusal(
            code=RefusalCode.NUM_HEADS,
            message="gfx950's kernel of 32 heads without a schedule mishandles ragged "
            "tails of split KV",
            got=f"{key.heads} heads without a schedule",
            allowed="a block that keeps its schedule",
            fix=_EXACT,
        )
