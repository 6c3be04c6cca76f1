"""Look into built wheels and source archives: what must be there, and nothing else.

Usage: ``check_wheels.py BUILT DISTRIBUTION...``, where BUILT is the folder of the built
files and each DISTRIBUTION a folder of this repository. Prints one line a fault; exit 1
if there is any.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SCRATCH = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
METADATA = frozenset({"METADATA", "RECORD", "WHEEL", "entry_points.txt"})


def expected_members(source: Path) -> set[str]:
    """Files of a ``src`` folder that its wheel must hold, scratch files aside."""
    return {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and not is_scratch(path.relative_to(source).as_posix())
    }


def is_scratch(member: str) -> bool:
    """Whether a path is what tools leave behind."""
    path = PurePosixPath(member)
    return not SCRATCH.isdisjoint(path.parts) or path.suffix in {".pyc", ".pyo", ".so"}


def wheel_faults(members: Iterable[str], expected: set[str]) -> Iterator[str]:
    """Say what a wheel lacks and what strayed into it.

    Args:
        members: Paths in the wheel.
        expected: Paths of the distribution's source.
    """
    held = {m for m in members if not m.endswith("/")}
    info = {m for m in held if m.split("/")[0].endswith(".dist-info")}
    package = held - info
    yield from (f"lacks {m}" for m in sorted(expected - package))
    yield from (f"holds a stray {m}" for m in sorted(package - expected))
    roots = {m.split("/")[0] for m in package}
    yield from (
        f"lacks {root}/py.typed"
        for root in sorted(roots)
        if f"{root}/py.typed" not in package
    )
    inside = {m.split("/", 1)[1] for m in info}
    if not any(m.startswith("licenses/") for m in inside):
        yield "lacks its licence"
    odd = {m for m in inside if m not in METADATA and not m.startswith("licenses/")}
    yield from (f"holds an odd {m} in its metadata" for m in sorted(odd))


def sdist_faults(members: Iterable[str]) -> Iterator[str]:
    """Say what a source archive lacks and what strayed into it."""
    held = {m.split("/", 1)[1] for m in members if "/" in m}
    needed = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
    yield from (f"lacks {m}" for m in sorted(needed - held))
    for member in sorted(held - needed - {".gitignore"}):
        if member.split("/")[0] not in {"src", "tests"} or is_scratch(member):
            yield f"holds a stray {member}"


def faults(built: Path, distribution: Path) -> Iterator[str]:
    """Look into the wheel and the source archive of one distribution."""
    source = distribution / "src"
    expected = expected_members(source)
    root = min(path.name for path in source.iterdir() if (path / "py.typed").is_file())
    wheel, sdist = find(built, root)
    if wheel is None or sdist is None:
        yield f"{distribution}: no wheel or no source archive was built"
        return
    with zipfile.ZipFile(wheel) as archive:
        for fault in wheel_faults(archive.namelist(), expected):
            yield f"{wheel.name}: {fault}"
    with tarfile.open(sdist) as archive_file:
        files = [m.name for m in archive_file.getmembers() if m.isfile()]
    for fault in sdist_faults(files):
        yield f"{sdist.name}: {fault}"


def find(built: Path, import_name: str) -> tuple[Path | None, Path | None]:
    """The wheel that holds a package, and the source archive beside it."""
    for wheel in sorted(built.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            if any(m.startswith(f"{import_name}/") for m in archive.namelist()):
                name, version = wheel.name.split("-")[:2]
                sdist = built / f"{name}-{version}.tar.gz"
                return wheel, sdist if sdist.exists() else None
    return None, None


def main(arguments: list[str]) -> int:
    """Check each named distribution."""
    built, *distributions = arguments
    found = [
        fault
        for distribution in distributions
        for fault in faults(Path(built), Path(distribution))
    ]
    for fault in found:
        sys.stdout.write(f"{fault}\n")
    wheels = len(list(Path(built).glob("*.whl")))
    sys.stdout.write(f"{wheels} wheels looked into, {len(found)} faults\n")
    return 1 if found or not distributions or wheels != len(distributions) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
