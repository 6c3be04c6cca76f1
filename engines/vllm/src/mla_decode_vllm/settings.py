"""What a user says to the plugin, in environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mla_decode import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mla_decode.selection import Lowering

MODE = "MLA_DECODE_VLLM"
LOWERING = "MLA_DECODE_VLLM_LOWERING"
OVER = "MLA_DECODE_VLLM_OVER"
OVER_CHOICES = ("CUSTOM", "TRITON_MLA", "FLASHMLA", "ROCM_AITER_MLA", "CPU_MLA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The plugin's settings; every process reads the same environment."""

    mode: str = "auto"
    """``off``, ``auto``, or the name of a backend."""
    lowering: Lowering = "refuse"
    """Whether exact rewrites are allowed."""
    over: str | None = None
    """The member of vLLM's enum to stand in for; None: the platform's."""

    @property
    def is_off(self) -> bool:
        """Whether vLLM keeps its own backends."""
        return self.mode == "off"

    @property
    def backend(self) -> str | None:
        """The backend asked for by name, or None for auto."""
        return None if self.mode == "auto" else self.mode


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings.

    Raises:
        ArgumentError: A variable holds a word that it does not take.
    """
    lowering = environment.get(LOWERING, "refuse")
    if lowering not in {"refuse", "exact"}:
        raise _unknown(LOWERING, lowering, "refuse, exact")
    over = environment.get(OVER)
    if over is not None and over not in OVER_CHOICES:
        raise _unknown(OVER, over, ", ".join(OVER_CHOICES))
    return Settings(
        mode=environment.get(MODE, "auto") or "auto",
        lowering=cast("Lowering", lowering),
        over=over,
    )


def _unknown(name: str, got: str, allowed: str) -> ArgumentError:
    return ArgumentError(
        f"{name} holds a word that it does not take.",
        got=repr(got),
        allowed=allowed,
        fix=f"unset {name}, or set it to one of these",
    )
