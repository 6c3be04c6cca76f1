"""Device memory of a problem: known before any is allocated, and counted afterwards."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from mla_decode.problem import ROW_WIDTH
from mla_decode.refusal import Refusal, RefusalCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from mla_decode.backend import Backend
    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.lowering.plan import Plan
    from mla_decode.problem import DecodeProblem

_INT32 = 4
ITEM_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Bytes of device memory that one builder of a problem takes, part by part.

    Neither the engine's tensors nor outputs are in it.
    """

    backend: int
    """Buffers of the backend's builder, those of a lowering included."""
    core: int
    """Core's part of the builder: block starts, graphs' buffers, the joined query."""
    call: int
    """What the kernel library allocates by itself inside one build or forward."""

    @property
    def total(self) -> int:
        """All of it: what a byte budget is held against."""
        return self.backend + self.core + self.call

    def as_dict(self) -> dict[str, int]:
        """A plain dictionary, the form that `--json` prints."""
        return {"total": self.total, **asdict(self)}


def core_bytes(problem: DecodeProblem, *, joins: bool) -> int:
    """What core's part of every builder holds for a problem.

    Args:
        problem: Sizes it.
        joins: Whether query pairs are joined into a buffer of the builder's.
    """
    most = problem.max_num_reqs
    total = _INT32 * len(problem.query_lens) * (most + 1)
    if problem.graphs:
        total += _INT32 * (most * (problem.table_width + 2) + most + 1)
    if joins:
        rows = most * problem.max_query_len * problem.num_q_heads
        total += rows * ROW_WIDTH * ITEM_BYTES[problem.q_dtype]
    return total


def workspace_of(backend: Backend, plan: Plan) -> Workspace:
    """What a builder of a planned problem takes; nothing is allocated for the answer."""
    joins = plan.kind != "native" or not getattr(backend, "takes_query_pair", False)
    cost = plan.cost
    return Workspace(
        backend=cost.workspace_bytes,
        core=core_bytes(plan.problem, joins=joins),
        call=cost.call_bytes,
    )


def over_budget(workspace: Workspace, limit_bytes: int) -> Refusal | None:
    """The refusal of a workspace that passes a budget; None where it fits."""
    if workspace.total <= limit_bytes:
        return None
    return Refusal(
        code=RefusalCode.WORKSPACE,
        message="The largest batch needs more device memory than the budget",
        got=f"{workspace.total} bytes ({workspace.backend} of the backend's builder, "
        f"{workspace.core} of core's, {workspace.call} inside a call)",
        allowed=f"workspace_limit_bytes={limit_bytes}",
        fix="raise the limit, or lower max_num_reqs, max_model_len or max_splits",
    )


def held_bytes(
    builder: MLADecodeMetadataBuilder, *, borrowed: Iterable[Tensor] = ()
) -> int:
    """Bytes of the device storages that a builder holds now, each counted once.

    Follows the containers and the objects of this project's packages that the builder
    refers to; what was not used yet, such as the joined query, is not there yet.

    Args:
        builder: Of any backend.
        borrowed: The engine's tensors, such as its caches, of which a builder may keep
            a view: their memory is not the builder's.
    """
    held: dict[int, int] = {}
    device = builder.device.type
    for storage in _storages(builder, device, set()):
        held[storage.data_ptr()] = storage.nbytes()
    for tensor in borrowed:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(held.values())


def _storages(thing: Any, device: str, seen: set[int]) -> Iterator[Any]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if hasattr(thing, "untyped_storage"):
        if thing.device.type == device and thing.untyped_storage().nbytes():
            yield thing.untyped_storage()
        return
    for part in _parts(thing):
        yield from _storages(part, device, seen)


def _parts(thing: Any) -> Iterator[Any]:
    """What an object of ours refers to; nothing for one of another library."""
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from thing
    elif any(base.__module__.startswith("mla_decode") for base in type(thing).__mro__):
        yield from getattr(thing, "__dict__", {}).values()
        if is_dataclass(thing):
            yield from (getattr(thing, field.name) for field in fields(thing))
