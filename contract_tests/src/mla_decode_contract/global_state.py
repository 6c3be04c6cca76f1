"""What a process shares: read, compared, and put back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalState:
    """The environment, torch's settings, and the like, at one moment."""

    environment: Mapping[str, str]
    settings: Mapping[str, Any]
    """By a name for messages."""

    @classmethod
    def now(cls) -> GlobalState:
        """Read it."""
        settings = {name: read() for name, (read, _) in _SETTINGS.items()}
        return cls(environment=dict(os.environ), settings=settings)

    def changed_by(self, later: GlobalState) -> list[str]:
        """Names of what is another, new or gone at a later moment."""
        variables = _differing(self.environment, later.environment)
        return [
            *(f"os.environ[{name!r}]" for name in variables),
            *_differing(self.settings, later.settings),
        ]

    def restore(self) -> None:
        """Put back what is another now; leave the rest alone."""
        now = GlobalState.now()
        for name in _differing(self.environment, now.environment):
            if name in self.environment:
                os.environ[name] = self.environment[name]
            else:
                del os.environ[name]
        for name in _differing(self.settings, now.settings):
            _, write = _SETTINGS[name]
            write(self.settings[name])


@cache
def first_state() -> GlobalState:
    """The state at the first call: before a process runs its first case."""
    return GlobalState.now()


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    names = sorted({*one, *other})
    return [name for name in names if one.get(name) != other.get(name)]


def _random_state() -> tuple[int, ...]:
    return tuple(torch.random.get_rng_state().tolist())


def _set_random_state(state: tuple[int, ...]) -> None:
    torch.random.set_rng_state(torch.tensor(state, dtype=torch.uint8))


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "the matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "the working directory": (os.getcwd, os.chdir),
    "the random state": (_random_state, _set_random_state),
}
