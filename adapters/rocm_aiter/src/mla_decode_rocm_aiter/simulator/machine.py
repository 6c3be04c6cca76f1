"""The simulated machine: an arch, a release, its faults, and what runs on it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch

from mla_decode_rocm_aiter.profiles import find_profile, known_releases
from mla_decode_rocm_aiter.resolve import find_program
from mla_decode_rocm_aiter.simulator.faults import Faults, SimulatedAbort
from mla_decode_rocm_aiter.simulator.memory import AddressBook
from mla_decode_rocm_aiter.sizes import CU_COUNTS
from mla_decode_rocm_aiter.tables import ARCHS

if TYPE_CHECKING:
    from mla_decode_rocm_aiter.keys import KernelKey
    from mla_decode_rocm_aiter.resolve import Program
    from mla_decode_rocm_aiter.rules import Profile
    from mla_decode_rocm_aiter.simulator.faults import AbortMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel that the simulated machine ran."""

    key: KernelKey
    kernel: str
    masks: bool
    """Whether this kernel masks by itself."""
    causal: bool
    """What the call asked for."""
    works: int
    """Work items, or requests where there was no schedule."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """State that AITER's simulated functions share."""

    arch: str = "gfx950"
    release: str = "0.1.20.post1"
    abort: AbortMode = "raise"
    faults: Faults = field(default_factory=Faults)
    cus: int = 0
    memory: AddressBook = field(default_factory=AddressBook)
    launches: list[Launch] = field(default_factory=list)
    schedules: int = 0
    """How many schedules were built."""
    profile: Profile = field(init=False)

    def __post_init__(self) -> None:
        """Refuse an arch or a release that nobody has read."""
        profile = find_profile(self.release)
        if profile is None:
            raise ValueError(
                f"no profile of AITER {self.release}; known: "
                f"{', '.join(known_releases())}"
            )
        if self.arch not in ARCHS:
            raise ValueError(f"no table for {self.arch}; known: {', '.join(ARCHS)}")
        self.profile = profile
        self.cus = self.cus or CU_COUNTS[self.arch]

    @property
    def fp8(self) -> torch.dtype:
        """The fp8 dtype of the arch: fnuz on gfx942, fn on gfx950."""
        if self.arch == "gfx942":
            return torch.float8_e4m3fnuz
        return torch.float8_e4m3fn

    def dtype_name(self, dtype: torch.dtype) -> str:
        """A torch dtype in the tables' words.

        Raises:
            AssertionError: The other arch's fp8, as AITER's enum has it.
        """
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", self.fp8: "fp8"}
        if dtype not in names:
            raise AssertionError(f"Unsupported dtype: {dtype}")
        return names[dtype]

    def program(
        self, dtypes: tuple[str, str], persistent: bool, causal: bool
    ) -> Program:
        """The release's rules for calls of this kind."""
        found = find_program(self.release, self.arch, dtypes, persistent, causal)
        if found is None:
            raise KeyError(self.release)
        return found

    def die(self, stage: str, message: str) -> NoReturn:
        """End as the release ends at this stage: by an exception or by SIGABRT."""
        if stage not in self.profile.aborts:
            raise RuntimeError(message)
        if self.abort == "native":
            os.write(2, f"[AITER] {message}\n".encode())
            os.abort()
        raise SimulatedAbort(message)

    def experimental(self) -> bool:
        """Whether AITER_ENABLE_EXPERIMENTAL is set, read at every call as AITER does."""
        try:
            return int(os.environ.get("AITER_ENABLE_EXPERIMENTAL", "0")) != 0
        except ValueError:
            return False
