"""A plan: how a backend serves a problem, natively or rewritten, as printable data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mla_decode.backend import Backend, Cost
    from mla_decode.device import DeviceInfo
    from mla_decode.problem import DecodeProblem

Kind = Literal["native", "fold", "pad", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a backend serves a problem."""

    kind: Kind
    """``native`` or the rewrite's name."""
    problem: DecodeProblem
    """What the backend's builder is built for."""
    cost: Cost
    """Of one step of the original problem's largest batch."""
    pad_rows: int = 0
    """Query rows a request that exist only to reach a kernel's width."""

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, the form that `--json` prints."""
        return {"kind": self.kind, **asdict(self.cost), "pad_rows": self.pad_rows}


def native_plan(problem: DecodeProblem, backend: Backend, device: DeviceInfo) -> Plan:
    """The plan of a backend that accepts the problem as it stands."""
    return Plan(kind="native", problem=problem, cost=backend.cost(problem, device))
