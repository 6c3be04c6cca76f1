"""What a mutant is, and how it stays the backend that it wraps but for one fault."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode_contract.catalogue import CASES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mla_decode.backend import Backend
    from mla_decode_contract.catalogue import Case
    from mla_decode_contract.clauses import Clause


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault, for any backend."""

    name: str
    clause: Clause
    """The clause that the fault breaks."""
    purpose: str
    """One sentence: what it does wrong."""
    apply: Callable[[Backend], Backend]
    """Wraps a backend; the original stays as it is."""
    needs: frozenset[str] = frozenset()
    """Features without which the fault cannot show: ``non_causal``, ``lse``..."""

    def can_show(self, passes: Mapping[str, bool]) -> bool:
        """Whether the fault can show on a backend.

        Args:
            passes: For the cases of the clause, whether the correct backend serves
                what they need (True) or rightly refuses it (False).
        """
        if not self.needs:
            return any(passes.values())
        by_features = (
            passes[case.id]
            for case in self.cases()
            if case.id in passes and self.needs <= set(case.features)
        )
        return any(by_features)

    def cases(self) -> tuple[Case, ...]:
        """The cases of the broken clause: one of these must catch it."""
        return tuple(case for case in CASES if case.clause is self.clause)


def derive(backend: Backend, **members: Any) -> Backend:
    """A copy of a backend whose class replaces some members.

    The class derives from the backend's own and keeps its names, so that a mutant
    passes for the original wherever a type, a name or a capability is asked for.
    """
    cls = type(backend)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    mutated = copy.copy(backend)
    mutated.__class__ = type(cls.__name__, (cls,), {**names, **members})
    return mutated


def derive_builder(cls: type[Any], **members: Any) -> type[Any]:
    """A builder class that derives from an adapter's and keeps its names."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**names, **members})
