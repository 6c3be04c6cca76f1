"""The names of a new adapter: one word for people, three for the tools."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec

from packaging.utils import canonicalize_name

from mla_decode.discovery import ENTRY_POINT_GROUP
from mla_decode_contract.scaffold.problem import ScaffoldProblem

LONGEST = 40
_FORM = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*", re.ASCII)
_RESERVED = frozenset({"auto"})
"""Words that selection takes for no backend's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A name in its three forms."""

    backend: str
    """The entry point's: what `run` is given."""
    distribution: str
    """What is installed, normalised as package indexes do."""
    module: str
    """What is imported."""

    @classmethod
    def parse(cls, name: str) -> Names:
        """Check a name and derive the others from it.

        Raises:
            ScaffoldProblem: It is no such name, or it is taken here.
        """
        if len(name) > LONGEST or _FORM.fullmatch(name) is None:
            raise ScaffoldProblem(
                f"{name!r} names no adapter",
                got=f"{name!r}",
                allowed="lower-case letters and digits, in words joined by single _ or "
                f"-, a letter first, at most {LONGEST} characters",
                fix=f"Try {_nearest(name)!r}.",
            )
        module = name.replace("-", "_")
        if keyword.iskeyword(module) or module in sys.stdlib_module_names:
            raise _taken(name, "a word of Python's own")
        if name in _RESERVED:
            raise _taken(name, "a word that selection reserves")
        if any(
            point.name.replace("-", "_") == module
            for point in entry_points(group=ENTRY_POINT_GROUP)
        ):
            raise _taken(name, "a backend that is installed here")
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            raise _taken(name, f"a module that is installed here ({spec.origin})")
        return cls(backend=name, distribution=canonicalize_name(name), module=module)


def _nearest(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    joined = "_".join(words)[:LONGEST].strip("_")
    return joined if joined[:1].isalpha() else f"mla_{joined}"[:LONGEST].strip("_")


def _taken(name: str, by: str) -> ScaffoldProblem:
    return ScaffoldProblem(
        f"The name {name!r} is taken",
        got=by,
        allowed="a name that nothing here has",
        fix=f"Try {_nearest(name + '_mla')!r}, or uninstall what has it.",
    )
