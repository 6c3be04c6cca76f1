"""The child's half: backends asked for everything, each answer said at once."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from mla_decode.diagnosis.children import say
from mla_decode.diagnosis.finding import Diagnoses, Finding, Level
from mla_decode.discovery import ENTRY_POINT_GROUP, discover
from mla_decode.errors import OutdatedLibraryError
from mla_decode.problem import DecodeProblem
from mla_decode.refusal import RefusalCode
from mla_decode.selection import AUTO_ORDER, ask, auto_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from mla_decode.backend import Backend
    from mla_decode.device import DeviceInfo
    from mla_decode.discovery import Candidate
    from mla_decode.refusal import Refusal

PLAIN = DecodeProblem(num_q_heads=16, max_num_reqs=8, max_model_len=4096)
"""What every backend can do: 16 heads, one token, bf16, pages of 64."""


def answer(
    device: DeviceInfo, skipped: Collection[str] = (), *, elsewhere: bool = False
) -> None:
    """Say what each backend finds; whoever is about to be asked is named before.

    A library whose import kills the process takes none of the earlier answers with it.

    Args:
        device: This machine's, or the one that its image is meant for.
        skipped: Backends that were asked by an earlier child.
        elsewhere: Whether this machine need not have the device: it was named.
    """
    known = discover()
    order = AUTO_ORDER.get(device.arch) or AUTO_ORDER[device.vendor]
    names = [*order, *sorted(set(known) - set(order))]
    asked = auto_names(device, known)
    for name in names:
        if name in known and name not in skipped:
            say(name=name, findings=[])
            wanted = name in order
            found = _about(
                known[name],
                device,
                wanted=wanted,
                by_name=name not in asked,
                elsewhere=elsewhere,
            )
            for finding in found:
                say(name=name, findings=[finding.as_dict()])
    say(name="", findings=[])


def _about(
    candidate: Candidate,
    device: DeviceInfo,
    *,
    wanted: bool,
    by_name: bool,
    elsewhere: bool,
) -> Iterator[Finding]:
    backend = candidate.backend
    if backend is None:
        yield _absent(candidate, wanted=wanted)
        return
    yield Finding(
        level=Level.OK,
        what=f"adapter {distribution_of(candidate.name)}",
        got=f"contract {backend.contract}",
    )
    hooked = list(_hooked(backend, device))
    yield from hooked
    yield from _outdated(backend, device)
    if backend.capability.row(device.arch) is None:
        yield Finding(level=Level.OK, what=f"does not serve {device.arch}")
        return
    told = {finding.what for finding in hooked}
    reasons = ask(backend, PLAIN, device)
    forgiven = {RefusalCode.DEVICE_ABSENT} if elsewhere else set()
    for reason in reasons:
        if reason.message not in told:
            yield _refused(reason, is_wrong=reason.code not in forgiven)
    if all(reason.code in forgiven for reason in reasons):
        yield from _libraries(backend, device)
        word = backend.evidence(device)
        verb = "would serve" if reasons else "serves"
        what = f"loads and {verb} {device.arch}: {word}"
        if by_name:  # auto does not ask it: whoever names no backend is not served
            what = f"{what}; only where it is asked for by name"
        else:
            say(serving=candidate.name)
        yield Finding(level=Level.OK, what=what)


def _refused(reason: Refusal, *, is_wrong: bool) -> Finding:
    if is_wrong:
        return Finding(
            level=Level.ERROR, what=reason.message, got=reason.got, fix=reason.fix
        )
    return Finding(
        level=Level.WARN,
        what=f"{reason.message}; the arch was named, and may be elsewhere",
        got=reason.got,
    )


def _absent(candidate: Candidate, *, wanted: bool) -> Finding:
    reason = candidate.refusal
    if reason is None:
        raise LookupError(candidate.name)
    if reason.code is not RefusalCode.DEPENDENCY:
        return Finding(
            level=Level.ERROR, what=reason.message, got=reason.got, fix=reason.fix
        )
    if wanted:
        return Finding(level=Level.WARN, what=reason.message, fix=reason.fix)
    return Finding(
        level=Level.OK, what=f"{reason.message}; this device does not need it"
    )


def _hooked(backend: Backend, device: DeviceInfo) -> Iterator[Finding]:
    hook: object = backend
    if isinstance(hook, Diagnoses):
        try:
            yield from hook.diagnose(device)
        except Exception as error:  # noqa: BLE001 - a broken hook is a finding, and hides no other
            yield _broken(backend, "the adapter's own diagnosis failed", error)


def _outdated(backend: Backend, device: DeviceInfo) -> Iterator[Finding]:
    """An old library, even where a lowering or another backend would serve."""
    try:
        backend.supports_non_causal(device)
    except OutdatedLibraryError as error:
        yield Finding(
            level=Level.ERROR,
            what=f"{error.library} is outdated: {error.message}",
            got=error.got,
            fix=error.fix,
        )
    except Exception as error:  # noqa: BLE001 - a gate that raises is a finding, as above
        yield _broken(backend, "the backend's non-causal gate failed", error)


def _libraries(backend: Backend, device: DeviceInfo) -> Iterator[Finding]:
    versions: Any = getattr(backend, "library_versions", None)
    if versions is None:
        return
    try:
        found = dict(versions(device))
    except Exception as error:  # noqa: BLE001 - as above
        yield _broken(backend, "the library's version cannot be read", error)
        return
    for library, version in found.items():
        yield Finding(level=Level.OK, what=f"library {library} {version}")


def _broken(backend: Backend, what: str, error: Exception) -> Finding:
    return Finding(
        level=Level.ERROR,
        what=what,
        got=f"{type(error).__name__}: {error}",
        fix=f"report this to the authors of {backend.name}",
    )


def distribution_of(name: str) -> str:
    """Who brings a backend's entry point, and its version."""
    points = entry_points(group=ENTRY_POINT_GROUP, name=name)
    found = (f"{p.dist.name} {p.dist.version}" for p in points if p.dist is not None)
    return next(found, "of no installed distribution")
