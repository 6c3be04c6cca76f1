"""What stands where AITER should: absent, another package, shadowed, old, being built."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mla_decode.diagnosis import Finding, Level
from mla_decode.diagnosis.places import standing_findings
from mla_decode.diagnosis.torch_build import wrong_torch
from mla_decode.refusal import Refusal
from mla_decode_rocm_aiter.capability import CAPABILITY
from mla_decode_rocm_aiter.facts import unknown_release
from mla_decode_rocm_aiter.gates import arch_has_non_causal
from mla_decode_rocm_aiter.importing import build_in_progress, import_decode
from mla_decode_rocm_aiter.installation import DISTRIBUTION, find_installation
from mla_decode_rocm_aiter.library import outdated
from mla_decode_rocm_aiter.profiles import find_profile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode.device import DeviceInfo
    from mla_decode_rocm_aiter.installation import Installation


def diagnose(device: DeviceInfo) -> Iterator[Finding]:
    """Say what is found, the answers that import AITER last.

    What is wrong counts as an error where the device decodes with AITER, and another
    package of its name does everywhere.
    """
    served = CAPABILITY.row(device.arch) is not None
    level = Level.ERROR if served else Level.WARN
    yield from standing_findings("aiter", level)
    found = find_installation()
    if isinstance(found, Refusal):
        level = _level_of_missing(served=served)
        if level is Level.OK:
            what = f"{found.message}; this device does not need it"
            yield Finding(level=level, what=what)
        else:
            yield _finding(found, level)
        return
    yield Finding(
        level=Level.OK,
        what=f"AITER {found.version} (distribution {DISTRIBUTION})",
        got=str(found.package),
    )
    if found.package.resolve().parent == Path.cwd().resolve():
        yield Finding(
            level=Level.WARN,
            what="AITER comes from a folder of the working directory, which stands "
            "before an installed one",
            got=str(found.package),
            fix="run from another folder, unless this tree is the one you mean",
        )
    torch = wrong_torch("AITER", "rocm", level)
    if torch is not None:
        yield torch
    yield from _release(found, device, served=served)


def _release(
    found: Installation, device: DeviceInfo, *, served: bool
) -> Iterator[Finding]:
    level = Level.ERROR if served else Level.WARN
    profile = find_profile(found.version)
    if profile is None:
        yield _finding(unknown_release(found.version), level)
    elif not profile.has_causal_argument and not arch_has_non_causal(device.arch):
        error = outdated(found.version)
        yield Finding(
            level=Level.WARN, what=error.message, got=error.got, fix=error.fix
        )
    locks = found.build_locks()
    if locks:
        yield _finding(build_in_progress(_aged(locks[0])), level)
    elif not served:
        decode = import_decode(found)
        if isinstance(decode, Refusal):
            yield _finding(decode, level)


def _aged(lock: Path) -> str:
    """A lock with its age, by which a killed build is told from one that runs."""
    try:
        minutes = (time.time() - lock.stat().st_mtime) / 60
    except FileNotFoundError:
        return f"{lock}, given back just now"
    return f"{lock}, {max(0.0, minutes):.0f} minutes old"


def _level_of_missing(*, served: bool) -> Level:
    """Absent is no fault: other backends serve. Another package in its place is."""
    try:
        is_absent = importlib.util.find_spec("aiter") is None
    except ValueError:
        is_absent = True
    if not is_absent:
        return Level.ERROR
    return Level.WARN if served else Level.OK


def _finding(reason: Refusal, level: Level) -> Finding:
    return Finding(level=level, what=reason.message, got=reason.got, fix=reason.fix)
