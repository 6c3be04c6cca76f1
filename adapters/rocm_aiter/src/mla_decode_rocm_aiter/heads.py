"""Head counts: what a model has, and what AITER is given for it."""

from __future__ import annotations

from functools import lru_cache

from mla_decode_rocm_aiter.keys import KernelKey
from mla_decode_rocm_aiter.profiles import PINNED_RELEASE
from mla_decode_rocm_aiter.resolve import resolve

GROUP = 16
"""Heads that AITER's kernels are built in groups of."""
MAX_HEADS = 128


class AiterMLAHelper:
    """The head rules under the names that engines know them by."""

    @staticmethod
    def is_valid_num_heads(num_heads: int) -> bool:
        """Whether the head count can be served: 1 to 128."""
        return 1 <= num_heads <= MAX_HEADS

    @staticmethod
    def get_actual_mla_num_heads(num_heads: int) -> int:
        """Heads that AITER is given: the next multiple of 16.

        24 heads become 32 although gfx950 has schedules for 24: at 5 and 16 tokens
        their work items are larger than the kernel's tile.
        """
        return -(-num_heads // GROUP) * GROUP

    @staticmethod
    def repeats(num_heads: int) -> int:
        """How often each head stands in the padded query, side by side.

        0 where the whole list is repeated instead and cut at the end.
        """
        return GROUP // num_heads if GROUP % num_heads == 0 else 0

    @staticmethod
    def has_fp8_non_causal_qlen2_kernel(
        num_heads: int, release: str = PINNED_RELEASE
    ) -> bool:
        """Whether an fp8 non-causal block of two tokens has a kernel, after padding.

        Args:
            num_heads: The model's, per rank.
            release: The AITER release asked about.
        """
        padded = AiterMLAHelper.get_actual_mla_num_heads(num_heads)
        return padded in fp8_non_causal_qlen2_heads(release)


@lru_cache(maxsize=64)
def fp8_non_causal_qlen2_heads(release: str) -> tuple[int, ...]:
    """Padded head counts whose fp8 non-causal block of two tokens has a kernel."""
    return tuple(
        heads
        for heads in range(GROUP, MAX_HEADS + 1, GROUP)
        if isinstance(
            resolve(release, "gfx950", heads, 2, "fp8", "fp8", True, False, False),
            KernelKey,
        )
    )


AITER_FP8_NON_CAUSAL_QLEN2_HEADS = fp8_non_causal_qlen2_heads(PINNED_RELEASE)
"""Of the pinned release: derived from its profile, which holds the only copy."""
