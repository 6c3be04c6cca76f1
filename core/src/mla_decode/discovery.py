"""Finding backends: entry points, one by one, each failure a refusal of its own."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from mla_decode.backend import Backend
from mla_decode.refusal import Refusal, RefusalCode
from mla_decode.version import CONTRACT_VERSION, is_compatible

if TYPE_CHECKING:
    from collections.abc import Iterable

ENTRY_POINT_GROUP = "mla_decode.backends"

KNOWN_DISTRIBUTIONS = {
    "reference": "mla-decode",
    "triton_mla": "mla-decode-triton",
    "rocm_aiter": "mla-decode-rocm-aiter",
    "cuda_flashmla": "mla-decode-cuda-flashmla",
}
"""Backends that exist, and what to install for them: candidates even when absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A backend by name: loaded, or the reason why it is not."""

    name: str
    backend: Backend | None = None
    refusal: Refusal | None = None


def discover(found: Iterable[EntryPoint] | None = None) -> dict[str, Candidate]:
    """All known and all installed backends, by name.

    Args:
        found: Entry points to load; by default those of the installed distributions.
    """
    points = entry_points(group=ENTRY_POINT_GROUP) if found is None else found
    by_name: dict[str, list[EntryPoint]] = {}
    for point in points:
        by_name.setdefault(point.name, []).append(point)
    candidates = {name: _only(same) for name, same in by_name.items()}
    for name, distribution in KNOWN_DISTRIBUTIONS.items():
        if name not in candidates:
            candidates[name] = Candidate(
                name=name,
                refusal=Refusal(
                    code=RefusalCode.DEPENDENCY,
                    message="The adapter is not installed",
                    got=f"no entry point {name!r} in {ENTRY_POINT_GROUP}",
                    allowed=distribution,
                    fix=f"pip install {distribution}",
                ),
            )
    return candidates


def _only(points: list[EntryPoint]) -> Candidate:
    values = sorted({point.value for point in points})
    if len(values) > 1:
        return _refused(
            points[0],
            RefusalCode.IMPORT,
            "Several backends have this name",
            ", ".join(values),
            "one entry point a name",
            "uninstall all but one of the distributions that provide it",
        )
    return _load(points[0])


def _load(point: EntryPoint) -> Candidate:
    try:
        return _admit(point, point.load())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one broken adapter must not hide the others, nor end the process
        return _refused(
            point,
            RefusalCode.IMPORT,
            "The adapter cannot be imported",
            f"{type(error).__name__}: {error}",
            "an entry point that loads",
            "reinstall the adapter, or read the error that it raises on import",
        )


def _admit(point: EntryPoint, backend: Any) -> Candidate:
    """Hold what an entry point loaded to the protocol, without reading properties."""
    missing = [name for name in _members() if not hasattr(type(backend), name)]
    missing = [name for name in missing if not hasattr(backend, name)]
    if missing or isinstance(backend, type):
        what = f"without {', '.join(missing)}" if missing else "a class, no instance"
        return _refused(
            point,
            RefusalCode.IMPORT,
            "The entry point is no backend",
            f"{getattr(backend, '__name__', type(backend).__name__)}: {what}",
            "an object that keeps the mla_decode.Backend protocol",
            "derive it from mla_decode.BackendBase and name an instance",
        )
    if backend.name != point.name:
        return _refused(
            point,
            RefusalCode.IMPORT,
            "The backend and its entry point have different names",
            f"{backend.name!r} behind {point.name!r}",
            "one name",
            "give the entry point the backend's name",
        )
    if not is_compatible(backend.contract):
        return _refused(
            point,
            RefusalCode.VERSION,
            "The adapter was written to another contract",
            f"contract {backend.contract}",
            f"contract {CONTRACT_VERSION} or an older minor of it",
            "upgrade mla-decode if the adapter is newer, else the adapter",
        )
    return Candidate(name=point.name, backend=backend)


def _members() -> list[str]:
    return [name for name in vars(Backend) if not name.startswith("_")]


def _refused(
    point: EntryPoint, code: RefusalCode, message: str, got: str, allowed: str, fix: str
) -> Candidate:
    reason = Refusal(code=code, message=message, got=got, allowed=allowed, fix=fix)
    return Candidate(name=point.name, refusal=reason)
