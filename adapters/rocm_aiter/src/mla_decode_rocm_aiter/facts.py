"""What is known of the AITER that a device would decode with."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from mla_decode import DeviceInfo, Refusal, RefusalCode
from mla_decode_rocm_aiter.importing import import_decode
from mla_decode_rocm_aiter.installation import (
    DISTRIBUTION,
    Installation,
    find_installation,
    simulated_release,
)
from mla_decode_rocm_aiter.manifest import read_manifest
from mla_decode_rocm_aiter.profiles import DEFAULT_RELEASE, find_profile
from mla_decode_rocm_aiter.resolve import compile_program, resolve_in
from mla_decode_rocm_aiter.simulation import read_variable
from mla_decode_rocm_aiter.tables import ARCHS, KernelTable, packaged_tables

if TYPE_CHECKING:
    from types import ModuleType

    from mla_decode_rocm_aiter.answers import AiterAnswers
    from mla_decode_rocm_aiter.keys import KernelKey
    from mla_decode_rocm_aiter.limits import LeavingVariables
    from mla_decode_rocm_aiter.resolve import Program
    from mla_decode_rocm_aiter.rules import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One AITER on one arch: its release, its kernel table, its signature."""

    arch: str
    release: str
    profile: Profile | None
    """None for a release that nobody has read."""
    table: KernelTable
    has_causal: bool
    """Whether `mla_decode_fwd` takes `causal=`, which also says what the table's
    causal column means."""
    has_non_causal_kernels: bool = field(init=False)
    """Whether the table holds kernels without a mask. Decided by the signature first:
    before 0.1.20 every row says causal=0 although its kernel masks."""
    programs: dict[tuple[tuple[str, str], bool, bool], Program] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    answers: dict[LeavingVariables, AiterAnswers] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """What this AITER answers, by the environment: it lives as long as they hold."""

    def __post_init__(self) -> None:
        """Read the table once."""
        found = self.has_causal and self.table.has_non_causal_rows()
        object.__setattr__(self, "has_non_causal_kernels", found)

    def resolve(
        self,
        heads: int,
        q: int,
        dtypes: tuple[str, str],
        *,
        persistent: bool,
        causal: bool,
        lse: bool,
    ) -> KernelKey | Refusal:
        """Resolve a call by the release's rules over this very table."""
        if self.profile is None:
            raise LookupError(f"no profile of AITER {self.release}")
        kind = (dtypes, persistent, causal)
        program = self.programs.get(kind)
        if program is None:
            program = compile_program(
                self.profile, self.table, dtypes, persistent, causal
            )
            self.programs[kind] = program
        return resolve_in(program, self.release, heads, q, lse)


def as_simulated(device: DeviceInfo) -> DeviceInfo:
    """The device that `MLA_DECODE_SIMULATE` names, where this machine has no GPU."""
    if device.vendor != "cpu":
        return device
    named = read_variable()
    if named is None:
        return device
    arch, release = named
    return DeviceInfo.assume(arch, libraries={DISTRIBUTION: release})


def assumed_release(device: DeviceInfo) -> str:
    """The release that an assumed device stands for."""
    named = device.libraries.get(DISTRIBUTION)
    if named is not None:
        return named
    variable = read_variable()
    if variable is not None and variable[0] == device.arch:
        return variable[1]
    return DEFAULT_RELEASE


def find_facts(device: DeviceInfo) -> Facts | Refusal:
    """What is known of the device's AITER, or the reason why nothing is.

    An assumed device has the release that it names, whatever is installed here.
    """
    if device.assumed:
        return packaged_facts(device.arch, assumed_release(device))
    simulated = simulated_release()
    if simulated is not None and simulated[0] == device.arch:
        return packaged_facts(*simulated)
    root, mla = sys.modules.get("aiter"), sys.modules.get("aiter.mla")
    decode = getattr(mla, "mla_decode_fwd", None)
    if root is not None and decode is not None:
        meta = os.environ.get("AITER_META_DIR")
        return _imported_facts(root, decode, device.arch, meta)
    return _facts_on_disk(device.arch)


@lru_cache(maxsize=16)
def _imported_facts(
    root: ModuleType, decode: object, arch: str, meta: str | None
) -> Facts | Refusal:
    """Facts of the AITER that this process has imported: they last as long as it does.

    Its kernel table is compiled into it: what replaces the files on the disk later is
    not what would run. Another import, or another AITER_META_DIR, is asked anew.
    """
    del root, decode, meta
    return _facts_on_disk(arch)


def _facts_on_disk(arch: str) -> Facts | Refusal:
    found = find_installation()
    if isinstance(found, Refusal):
        return found
    return installed_facts(found, arch)


@lru_cache(maxsize=128)
def packaged_facts(arch: str, release: str) -> Facts | Refusal:
    """Facts of a release from its profile alone."""
    profile = find_profile(release)
    if profile is None:
        return unknown_release(release)
    if arch not in ARCHS:
        return Refusal(
            code=RefusalCode.ARCH,
            message="AITER's MLA decode is known for two archs only",
            got=arch,
            allowed=", ".join(ARCHS),
            fix="use triton_mla on this device",
        )
    return Facts(
        arch=arch,
        release=release,
        profile=profile,
        table=packaged_tables()[arch, profile.tables[arch]],
        has_causal=profile.has_causal_argument,
    )


def installed_facts(installation: Installation, arch: str) -> Facts | Refusal:
    """Facts of an installed AITER: its own table, its own signature."""
    table = read_manifest(installation, arch)
    if isinstance(table, Refusal):
        return table
    decode = import_decode(installation)
    if isinstance(decode, Refusal):
        return decode
    has_causal = "causal" in inspect.signature(decode).parameters
    profile = find_profile(installation.version)
    if profile is not None and profile.has_causal_argument != has_causal:
        return Refusal(
            code=RefusalCode.VERSION,
            message="the installed AITER is not the release that its version names: "
            "the signatures of mla_decode_fwd differ",
            got=f"AITER {installation.version}, causal "
            f"{'present' if has_causal else 'absent'}",
            allowed="the signature of that release",
            fix="reinstall AITER, or run `mla-decode probe rocm_aiter`",
        )
    return Facts(
        arch=arch,
        release=installation.version,
        profile=profile,
        table=table,
        has_causal=has_causal,
    )


def unknown_release(release: str) -> Refusal:
    """Fail closed, with the way out."""
    return Refusal(
        code=RefusalCode.VERSION,
        message=f"nobody has read what AITER {release} does with an MLA decode call",
        got=f"AITER {release}",
        allowed=f"a release with a profile, such as {DEFAULT_RELEASE}",
        fix="run `mla-decode probe rocm_aiter` on the GPU, or install a known release",
    )
