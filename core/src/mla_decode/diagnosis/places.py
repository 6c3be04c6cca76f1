"""Where a library's name leads: every place on the path, and who wrote there."""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from mla_decode.diagnosis.finding import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def places_of(module: str) -> tuple[Path, ...]:
    """Every file or folder on the path that a top-level module's name finds.

    The first is the one that is imported. A folder without ``__init__.py`` counts only
    where nothing better lies behind it: Python passes it over otherwise.
    """
    found: dict[Path, bool] = {}
    for entry in sys.path:
        spec = PathFinder.find_spec(module, [entry or str(Path.cwd())])
        if spec is None:
            continue
        folders = spec.submodule_search_locations
        place = Path(next(iter(folders)) if folders else str(spec.origin)).resolve()
        found.setdefault(place, spec.origin is None)
    packages = tuple(place for place, is_bare in found.items() if not is_bare)
    return packages or tuple(found)


def owners_of(module: str) -> tuple[str, ...]:
    """Distributions that say they ship a top-level module, with their versions."""
    names = sorted(set(_shipped(tuple(sys.path)).get(module, ())))
    return tuple(f"{name} {metadata.version(name)}" for name in names)


@cache
def _shipped(_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Who ships which package; every installed file's name is read, so once a path."""
    return metadata.packages_distributions()


def standing_findings(module: str, level: Level) -> Iterator[Finding]:
    """What is wrong with how a library's name is taken; imports nothing.

    Args:
        module: The library's top-level module.
        level: How much it matters on this device.
    """
    places = places_of(module)
    if not places:
        return
    first, *hidden = places
    if hidden:
        yield Finding(
            level=level,
            what=f"several modules named {module} lie on the path: the first hides "
            "the others",
            got=f"{first} before {', '.join(map(str, hidden))}",
            fix=f"rename or remove {first}, or run from another folder, unless it is "
            "the one you mean",
        )
    owners = owners_of(module)
    if len(owners) > 1:
        yield Finding(
            level=level,
            what=f"several distributions wrote into one package {module}",
            got=", ".join(owners),
            fix="uninstall all of them, then install one",
        )
